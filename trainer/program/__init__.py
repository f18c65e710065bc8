"""A training program of the user's own: its start and end, its data, checkpoints and model.

Two processes belong to each task. The agent (`agent`) is Flotilla's: it prepares the folders, fills
and publishes checkpoints, and decides what the end of the program means. The guard (`guard`) is one
file of the standard library, which also runs in an image without Flotilla: it starts the program,
relays its output and signals, and leaves no process of it behind. `messages` is what they say to
each other.
"""
