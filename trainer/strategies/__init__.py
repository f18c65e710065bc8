"""How a training step runs on the cluster: one interface, one file a strategy.

Its name and what it can do are a row in `TOPOLOGIES` of `trainer/config/topology.py`. Global steps
are counted by `exact_counter` in `strategy.py`.
"""
