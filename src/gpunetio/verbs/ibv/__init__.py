"""Objects of devices without DEVX: libibverbs makes them and carries their requests."""
