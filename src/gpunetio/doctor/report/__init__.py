"""How findings are printed and drawn."""
