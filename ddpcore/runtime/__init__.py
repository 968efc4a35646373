"""The environment of a process: ranks, machine, memory and signals."""
