"""The preflight check, which finds mistakes before a run requests a GPU.

A check examines one thing and returns a `Finding`: a state, a message, and a command that fixes or
explains the problem. `checks` lists the checks of a configuration, and `examination` runs them.
"""
