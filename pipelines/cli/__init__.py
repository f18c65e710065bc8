"""The command line, which prints results and sets exit codes."""
