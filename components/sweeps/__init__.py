"""The steps that exist only in the pipeline of a sweep."""
