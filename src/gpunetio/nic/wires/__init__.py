"""The wires of a NIC as its control path sees them, one module for each kind."""
