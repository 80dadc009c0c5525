"""Objects of devices without DEVX: libibverbs creates them and carries out their requests."""
