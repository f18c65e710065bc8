"""The completion of command lines by a shell."""
