"""One reader for each format of files, and what they are read into."""
