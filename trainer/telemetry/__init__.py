"""What a task reports while it trains: Prometheus metrics and TensorBoard summaries."""
