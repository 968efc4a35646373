"""What every command shows: tables of the terminal, charts as plain values, and pictures of them."""
