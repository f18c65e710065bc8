"""The data gate, which checks a dataset against rules and against the champion's dataset."""
