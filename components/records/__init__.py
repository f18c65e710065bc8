"""What a run leaves of itself: the frame and record of each step, and the facts of its report."""
