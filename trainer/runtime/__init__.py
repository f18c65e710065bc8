"""Basics that every process needs: errors, safe text, signals and environment variables."""
