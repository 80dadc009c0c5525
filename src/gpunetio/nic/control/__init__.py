"""The control path of the NIC: commands, ports, links to other NICs."""
