"""What runs leave on disk: names and formats of their files, and what reads them."""
