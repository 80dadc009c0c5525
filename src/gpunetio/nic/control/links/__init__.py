"""Links to other NICs, the LAN of a host, and routes to peers."""
