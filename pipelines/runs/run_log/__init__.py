"""The readable logs of a run, on this machine and on a KFP instance."""
