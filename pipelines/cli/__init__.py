"""The command line: only this code prints and sets exit codes."""
