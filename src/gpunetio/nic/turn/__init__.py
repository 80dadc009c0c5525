"""Turns of a worker: what the engine does again and again, on a thread of the CPU or on a GPU."""
