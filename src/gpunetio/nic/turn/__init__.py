"""Turns of a worker: the iterations of the engine's loop, on a CPU thread or on a GPU."""
