"""The container image of every component and of every task of a cluster."""

import re

IMAGE = "flotilla-python:0.1.0"
_NAME = re.compile(
    r"[a-z0-9][a-z0-9._-]*(:\d+)?"  # a host, or the name itself
    r"(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
    r"(:\w[\w.-]{0,127})?(@sha256:[0-9a-f]{64})?",
    re.ASCII,
)


def is_image(name: str) -> bool:
    """Say whether a text is the name of an image, with or without host, tag and digest."""
    return _NAME.fullmatch(name) is not None
