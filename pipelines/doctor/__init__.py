"""The preflight check: finds mistakes before a run requests a GPU.

A check examines one thing and returns one `Finding`: a state, a line, and a command that fixes it.
`checks` lists the checks of a configuration, and `examination` runs them.
"""
