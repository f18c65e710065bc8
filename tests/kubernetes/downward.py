"""The downward API: pod fields that environment variables can refer to."""

import re
from typing import Any

from tests.kubernetes.store import Tree

_MAPPING = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


def field_of(pod: Tree, path: str) -> str:
    """Return the value of a `fieldRef`; empty if the pod lacks the label or annotation."""
    found = _MAPPING.fullmatch(path)
    if found:
        return str((pod["metadata"].get(found[1]) or {}).get(found[2], ""))
    node: Any = pod
    for key in path.split("."):
        node = (node or {}).get(key)
    return "" if node is None else str(node)
