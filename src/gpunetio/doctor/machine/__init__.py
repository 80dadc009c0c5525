"""What is read of a machine: devices, files, programs, drivers."""
