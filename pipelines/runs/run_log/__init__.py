"""The logs of a run as a person reads them, on this machine and on a KFP instance."""
