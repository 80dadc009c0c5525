"""The NIC's tables, which the engine works on."""
