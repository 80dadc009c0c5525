"""Readings of a machine: devices, files, programs, drivers."""
