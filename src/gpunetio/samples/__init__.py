"""The samples of DOCA, one module each: complete programs, to be read from top to bottom."""
