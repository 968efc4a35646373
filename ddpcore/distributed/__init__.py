"""``distribute``, the hooks that it sets on a training loop, and the state that learners share beside the weights."""
