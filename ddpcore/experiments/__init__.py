"""Published experiments as commands: rows that are trained again, and claims that are checked against the results."""
