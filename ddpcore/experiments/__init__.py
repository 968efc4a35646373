"""Published experiments as commands: rows that are trained again, and claims that are held against them."""
