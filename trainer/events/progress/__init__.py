"""The progress of long work: how it is counted and formatted."""
