"""Measurements of Flotilla: compared with other programs, and with published results."""
