"""What makes pages of the documentation."""
