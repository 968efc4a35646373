"""Parameters and gradients as flat buffers, the buckets of a backward pass, and models of virtual learners."""
