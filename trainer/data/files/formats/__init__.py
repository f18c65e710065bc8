"""One reader for each file format, and the rows that they yield."""
