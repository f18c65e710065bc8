"""What a task reports while it trains: metrics for Prometheus, summaries for TensorBoard."""
