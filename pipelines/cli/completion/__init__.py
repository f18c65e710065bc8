"""Shell completion of command lines."""
