"""Turns on threads of the CPU."""
