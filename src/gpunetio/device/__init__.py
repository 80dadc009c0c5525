"""The device library: what kernels call, written once in Python, compiled for CPU threads and for CUDA."""
