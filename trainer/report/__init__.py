"""The report and the summary of a run."""
