"""The records of a run: what each step did, and the data for its report."""
