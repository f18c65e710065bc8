"""What all Kubernetes engines share."""
