"""Runs a user's training program, stages its data, and publishes its checkpoints and model.

Each task has two processes. The agent (`agent`) belongs to Flotilla: it prepares the folders,
restores and publishes checkpoints, and decides what follows when the program exits. The guard
(`guard`) is a single file that needs only the standard library, so that it also runs in an image
without Flotilla: it starts the program, relays its output and signals, and kills all processes that
the program leaves behind. `link` describes the messages between the two.
"""
