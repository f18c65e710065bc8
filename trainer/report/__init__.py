"""The page and the summary of a run."""
