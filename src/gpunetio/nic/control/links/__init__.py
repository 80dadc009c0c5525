"""Links to other NICs, the LAN of a host, and the ways to addresses."""
