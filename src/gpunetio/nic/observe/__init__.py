"""Observe a running NIC: its tables, counters and flow rules, and reports of refusals."""
