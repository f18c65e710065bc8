"""A step of a run again on this machine: what it was given is found, fetched, run and compared."""
