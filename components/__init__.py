"""The steps of the pipeline, one file each: the KFP component and its body."""
