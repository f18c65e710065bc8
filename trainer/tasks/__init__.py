"""Learning tasks: labels, losses, metrics and answers.

One file per task, which implements `base.Task`; its name is a row in `TASKS` of
`trainer/config/schema.py`.
"""
