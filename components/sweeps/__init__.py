"""The steps of a sweep on a KFP instance that a run does not have."""
