"""The steps that only the pipeline of a sweep has."""
