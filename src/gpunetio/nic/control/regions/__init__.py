"""PDs, memory keys and UMEMs, and which memory other NICs and GPUs share."""
