"""Print and draw findings."""
