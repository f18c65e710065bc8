"""The learning tasks: their labels, losses, metrics and answers.

Each task has a module with a subclass of `base.Task`, and a row in `TASKS` of
`trainer/config/schema.py`.
"""
