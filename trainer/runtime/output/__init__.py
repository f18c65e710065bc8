"""What processes write: times before lines that are printed, and no noise of libraries."""
