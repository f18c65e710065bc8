"""What the engines on Kubernetes share."""
