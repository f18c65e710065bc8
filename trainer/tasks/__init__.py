"""The learning tasks: their labels, losses, metrics and answers.

Each task is a subclass of `base.Task`, and has a row in `TASKS` of `trainer/config/schema.py`.
"""
