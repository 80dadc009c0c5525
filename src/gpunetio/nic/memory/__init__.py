"""Memory: keys, and how payload gets to and from where the engine cannot or need not copy it."""
