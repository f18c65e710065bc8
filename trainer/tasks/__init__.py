"""Learning tasks: what is predicted, by which loss, and how well.

One file a task, which implements `base.Task`; its name is a row in `TASKS` of
`trainer/config/schema.py`.
"""
