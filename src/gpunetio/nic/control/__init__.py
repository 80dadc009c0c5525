"""The control path of the NIC: commands by object type, and links to other NICs. Start reading at control_path.py."""
