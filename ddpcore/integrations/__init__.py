"""ddpcore inside trainers of other packages. Each module imports its package, so none is imported here."""
