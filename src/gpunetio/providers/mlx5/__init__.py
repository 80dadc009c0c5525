"""Cards: rdma-core (libibverbs, libmlx5) through ctypes, and the provider that drives NVIDIA devices through DEVX."""
