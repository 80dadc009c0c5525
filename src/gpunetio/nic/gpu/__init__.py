"""Turns in slices, where queues and payload are in memory of a GPU; and the twin of a GPU on the host."""
