"""The output of processes: timestamps before printed lines, and filters for library noise."""
