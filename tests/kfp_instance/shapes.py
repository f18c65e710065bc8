"""Checks JSON against the models of the KFP client, because the client ignores unknown keys."""

import re
from typing import Any

from kfp_server_api import models

SCALARS = {"str": str, "bool": bool, "int": int, "float": (int, float), "datetime": str}


# 64-bit integers are strings in responses, but may be numbers in requests.
INT64 = ("max_concurrency", "interval_second")


def with_text(tree: Any) -> Any:
    """Return the JSON with 64-bit integers as strings, as a real instance sends them."""
    if isinstance(tree, dict):
        return {
            key: str(value) if key in INT64 and isinstance(value, int) else with_text(value)
            for key, value in tree.items()
        }
    return [with_text(each) for each in tree] if isinstance(tree, list) else tree


class ShapeError(ValueError):
    """A JSON value does not match its model."""


def check(tree: Any, kind: str, where: str = "") -> None:
    """Raise `ShapeError` unless `tree` matches the model `kind`."""
    place = where or kind
    if listed := re.fullmatch(r"list\[(.*)\]", kind):
        _require(isinstance(tree, list), place, "list")
        for number, each in enumerate(tree):
            check(each, listed[1], f"{place}[{number}]")
    elif mapped := re.fullmatch(r"dict\((.*), (.*)\)", kind):
        _require(isinstance(tree, dict), place, "mapping")
        for name, each in tree.items():
            check(each, mapped[2], f"{place}.{name}")
    elif kind in SCALARS:
        _require(isinstance(tree, SCALARS[kind]), place, kind)
    elif kind != "object":
        _check_model(tree, getattr(models, kind), place)


def _check_model(tree: Any, model: Any, place: str) -> None:
    if not model.openapi_types:
        allowed = [value for name, value in vars(model).items() if name.isupper()]
        _require(tree in allowed, place, f"one of {allowed}")
        return
    _require(isinstance(tree, dict), place, "object")
    names = {key: attribute for attribute, key in model.attribute_map.items()}
    for key, value in tree.items():
        _require(key in names, f"{place}.{key}", f"key of {model.__name__}")
        check(value, model.openapi_types[names[key]], f"{place}.{key}")


def _require(holds: bool, place: str, what: str) -> None:
    if not holds:
        raise ShapeError(f"{place} is no {what}")
