"""One reader for each file format, and the rows that readers yield."""
