"""The formats of mlx5 and of the device structures, each declared once, as a table."""
