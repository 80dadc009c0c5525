"""Objects that are created by mailboxes, and the rings of their queues."""
