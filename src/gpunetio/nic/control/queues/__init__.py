"""Queue pairs, completion, event, send and receive queues, and the objects that distribute packets to queues."""
