"""What Prometheus scrapes of a run: its metrics, what they are made of, and the server."""
