"""The pods of a job: their templates, the processes in them, and their status."""
