"""`flotilla doctor`: what is wrong is found before a GPU is asked for.

A check is a function that looks at one thing and returns one `Finding`: a state, a line, and the
command that mends it. It changes nothing that it does not remove again. `catalogue` lists the
checks, `examination` runs them, `command` shows what they found.
"""
