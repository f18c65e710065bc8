"""The basics of every process: errors, safe text, signals and environment variables."""
