"""What queues consist of in memory: WQEs, CQEs, doorbells, events."""
