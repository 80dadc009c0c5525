"""The interfaces below the control path: the engine, its backend for slices, and the port."""
