"""Local runs and runs on a KFP instance. The functions return values and never print."""
