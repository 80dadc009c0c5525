"""What a running NIC tells: counters, reasons, reports."""
