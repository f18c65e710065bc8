"""The gate, the registry and promotions."""
