"""The processes of a training cluster on one machine: start, supervision, leases, liveness."""
