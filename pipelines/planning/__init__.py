"""How fast a cluster will be, what it needs and costs: by simulation, before anything starts."""
