"""Processes of a training cluster on one machine: starting, watching, leases, liveness, signals."""
