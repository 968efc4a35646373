"""The version of ddpcore, for the package, its metadata and every record."""

VERSION = "0.3.0"
