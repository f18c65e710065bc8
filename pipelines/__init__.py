"""The pipelines and the command line."""
