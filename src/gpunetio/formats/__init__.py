"""The formats of mlx5 and of the device structures: declared once, as tables, and used by everything else."""
