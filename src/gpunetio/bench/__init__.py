"""Benchmarks over one-sided operations: bandwidth and latency, every byte that arrives checked."""
