"""The pipeline, and the command line around it."""
