"""One line around a training loop: ``distribute``, its hooks, and what it keeps in step."""
