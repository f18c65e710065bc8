"""The command line: the only code that prints and knows exit codes."""
