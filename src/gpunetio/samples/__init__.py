"""DOCA's samples, one module each: complete programs, to be read from top to bottom."""
