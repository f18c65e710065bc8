"""Code that all Kubernetes engines share."""
