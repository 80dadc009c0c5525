"""PDs, memory keys and UMEMs, device memory, and memory shared with other NICs."""
