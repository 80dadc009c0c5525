"""The engine on CPU threads: the threads make the NIC's turns."""
