"""The progress of long work: counted, and formatted."""
