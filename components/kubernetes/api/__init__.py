"""A client of the Kubernetes API for one namespace."""
