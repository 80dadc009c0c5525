"""Cards: rdma-core (libibverbs, libmlx5) by ctypes, and the provider for devices of NVIDIA that drives them by DEVX."""
