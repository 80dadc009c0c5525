"""Objects created with DEVX commands, and the rings of their queues."""
