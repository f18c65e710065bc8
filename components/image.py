"""The container image of every component and of every task of a cluster."""

IMAGE = "flotilla-python:0.1.0"
