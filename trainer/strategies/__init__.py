"""How a training step runs on the cluster: one interface, and one module for each strategy.

The table `TOPOLOGIES` in `trainer/config/topology.py` holds the names and capabilities of the
strategies. `exact_counter` in `strategy.py` counts the global steps.
"""
