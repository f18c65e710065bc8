"""What the pods of a job are made of, run, and say."""
