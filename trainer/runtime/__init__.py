"""What every process needs: errors, text that is safe to print, signals, the environment."""
