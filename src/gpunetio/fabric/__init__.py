"""Wires between NICs."""
