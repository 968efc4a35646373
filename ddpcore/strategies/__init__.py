"""The algorithms that keep learners together, one a file, and the baselines single and ddp."""
