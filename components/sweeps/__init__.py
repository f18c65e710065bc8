"""The steps of a sweep on a KFP instance, which a run does not have."""
