"""Probes try out a NIC and a GPU."""
