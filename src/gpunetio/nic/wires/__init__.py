"""The wires of a NIC as the control path sees them, with one module per type."""
