"""The command line. Only this package prints and sets exit codes."""
