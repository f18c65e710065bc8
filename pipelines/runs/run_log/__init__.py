"""The readable logs of local runs and of runs on a KFP instance."""
