"""The records of a run: the frame and record of each step, and the facts of its report."""
