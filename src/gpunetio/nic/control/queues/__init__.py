"""Completion, event, send and receive queues, and what decides which packets they get."""
