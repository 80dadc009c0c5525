"""Cards: rdma-core (libibverbs, libmlx5) through ctypes, and a provider that drives NVIDIA devices through DEVX."""
