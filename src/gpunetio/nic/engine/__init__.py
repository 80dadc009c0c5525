"""What the control path acts on, whatever makes the turns: an engine, its place, a port."""
