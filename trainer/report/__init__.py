"""One run on one page, and in one summary."""
