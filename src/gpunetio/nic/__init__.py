"""The software NIC: mlx5 commands in, queues in memory, packets out."""
