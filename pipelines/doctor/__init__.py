"""The preflight: finds what is wrong before a run requests a GPU.

A check is a function that examines one thing and returns one `Finding`: a state, a line, and the
command that fixes it. It removes whatever it leaves. `checks` lists the checks of a configuration,
`examination` runs them; `pipelines.cli.doctor` prints what they find.
"""
