"""The command line that trains with several strategies and compares them."""
