"""The control path of the NIC: commands by object, and links to other NICs. control_path.py is where to begin."""
