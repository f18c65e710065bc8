"""How the API server handles a custom resource: defaults, unknown fields and types.

The schema comes from the CRD, which is not part of this repository; if it is missing, objects are
not validated. The behavior is that of Kubernetes 1.33 (`apiextensions-apiserver`); the strict
decoder's messages were observed on a real cluster.
"""

import functools
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.kubernetes.store import Tree

FOLDER = Path(__file__).parents[2] / "../shared/schemas"
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}


@functools.cache
def schema(name: str) -> Tree:
    """Return the schema of a CRD such as `jobset.x-k8s.io_jobsets`; empty if the CRD is missing."""
    path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        return {}
    tree: Tree = yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)
    found: Tree = tree["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def pruned(tree: Tree, schema: Tree, lacks: Collection[str] = ()) -> list[str]:
    """Drop unknown fields, set defaults, and return the dropped fields.

    `lacks` names fields that an older schema lacks, such as `spec.coordinator` or
    `spec.replicatedJobs.groupName`.
    """
    if not schema:
        return []
    dropped: list[str] = []
    for key in list(tree):
        if key == "metadata":
            continue
        if key not in schema["properties"]:
            dropped.append(key)
            del tree[key]
        else:
            dropped.extend(_pruned(tree[key], schema["properties"][key], key, key, lacks))
    return dropped


def _pruned(
    node: Any, schema: Tree, path: str, plain: str, lacks: Collection[str]
) -> Iterator[str]:
    if isinstance(node, list) and "items" in schema:
        for index, each in enumerate(node):
            yield from _pruned(each, schema["items"], f"{path}[{index}]", plain, lacks)
    if not isinstance(node, dict) or schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    for key in list(node):
        below, its = f"{path}.{key}", f"{plain}.{key}"
        if key in properties and its not in lacks:
            yield from _pruned(node[key], properties[key], below, its, lacks)
        elif others is None or its in lacks:
            del node[key]
            yield below
    for key, each in properties.items():
        if "default" in each and f"{plain}.{key}" not in lacks:
            node.setdefault(key, each["default"])


def invalid(node: Any, schema: Tree, path: str = "") -> list[str]:
    """Return the violations of the schema: wrong types, missing fields, invalid values."""
    kind, found = schema.get("type", ""), []
    wanted = _TYPES.get(kind, (object,))
    is_bool = isinstance(node, bool) and kind in ("integer", "number")
    if not isinstance(node, wanted) or is_bool:
        named = {
            "dict": "object",
            "list": "array",
            "str": "string",
            "bool": "boolean",
            "NoneType": "null",
        }
        its = named.get(type(node).__name__, "integer")
        return [f'{path}: Invalid value: "{its}": {path} in body must be of type {kind}: "{its}"']
    if "enum" in schema and node not in schema["enum"]:
        values = ", ".join(f'"{each}"' for each in schema["enum"])
        found.append(f'{path}: Unsupported value: "{node}": supported values: {values}')
    if isinstance(node, list):
        for index, each in enumerate(node):
            found += invalid(each, schema.get("items", {}), f"{path}[{index}]")
    if isinstance(node, dict):
        properties, dot = schema.get("properties", {}), "." if path else ""
        missing = [each for each in schema.get("required", []) if each not in node]
        found += [f"{path}{dot}{each}: Required value" for each in missing]
        for key, each in node.items():
            if key in properties and not (not path and key == "metadata"):
                found += invalid(each, properties[key], f"{path}{dot}{key}")
    return found


def changed(old: Tree, new: Tree, schema: Tree) -> list[str]:
    """Return an error for each changed field that the schema declares immutable."""
    properties = schema.get("properties", {}).get("spec", {}).get("properties", {})
    return [
        f'spec.{key}: Invalid value: "{each.get("type", "object")}": Value is immutable'
        for key, each in properties.items()
        # A transition rule applies only if both an old and a new value exist.
        if key in old["spec"] and key in new["spec"] and old["spec"][key] != new["spec"][key]
        for rule in each.get("x-kubernetes-validations", [])
        if rule["rule"] == "self == oldSelf"
    ]
