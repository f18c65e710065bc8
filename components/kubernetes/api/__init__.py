"""The Kubernetes API of a namespace."""
