"""The benchmarks' kernels."""
