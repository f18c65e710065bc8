"""The steps of the pipeline: each file has a KFP component and its body."""
