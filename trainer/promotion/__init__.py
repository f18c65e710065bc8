"""The gate, the model registry and promotions."""
