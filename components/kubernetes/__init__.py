"""The shared parts of the Kubernetes engines."""
