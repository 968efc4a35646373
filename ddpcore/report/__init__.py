"""The page about runs, studies and benches. It reads files and changes none of them; no other part imports it."""
