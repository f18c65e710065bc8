"""Validates the pod settings of a user as Kubernetes does, such as quantities and tolerations.

A validator returns its argument, or raises a `ValueError` that states the allowed values. Without
this check, the pod's controller would reject the value minutes later, in an event that few users
see.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from flotilla.trainer.runtime.errors import nearest

# Quantities that `resource.ParseQuantity` of apimachinery accepts, but without a sign, because pods
# accept no negative quantities.
_QUANTITY = re.compile(
    r"(?P<number>[0-9]{1,18}(\.[0-9]{0,9})?|\.[0-9]{1,9})"
    r"(?P<unit>[KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?"
)
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {unit: 1 << (10 * power) for power, unit in enumerate("KMGTPE", start=1)}
_LEAST_MEMORY = 2**20
# Image names as in github.com/distribution/reference. The first part is a host if it contains a
# dot, a port or brackets (IPv6). Only a host may contain capital letters.
_HOST = r"([A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+(:\d+)?|[A-Za-z0-9-]+:\d+|\[[0-9A-Fa-f:]+\](:\d+)?)"
_PART = r"[a-z0-9]+((\.|__?|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"({_HOST}/)?{_PART}(/{_PART})*(:\w[\w.-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?", re.ASCII
)
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_KEY = re.compile(
    r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
)
_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_OPERATORS, _EFFECTS = ("Equal", "Exists"), ("NoSchedule", "PreferNoSchedule", "NoExecute")
_TOLERATION = ("key", "operator", "value", "effect", "tolerationSeconds")


def quantity(text: str) -> str:
    """Validate a quantity, for example of CPUs."""
    amount(text)
    return text


def memory(text: str) -> str:
    """Validate an amount of memory for a container. Without a unit, it is in bytes."""
    if amount(text) < _LEAST_MEMORY:
        raise ValueError(f"{text!r} is less than 1Mi; write it with its unit, such as 4Gi")
    return text


def count(text: str) -> str:
    """Validate a number of GPUs."""
    if not re.fullmatch(r"[0-9]{1,4}", text):
        raise ValueError(f"{text!r} is not a number of GPUs; write 0 or more")
    return text


def image(name: str) -> str:
    """Validate the name of an image, with or without host, tag and digest."""
    if not _IMAGE.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of an image; write it as host/name:tag")
    return name


def name(text: str) -> str:
    """Validate the name of an object such as a secret."""
    if not _NAME.fullmatch(text):
        raise ValueError(
            f"{text!r} is not a valid Kubernetes name; use lowercase letters, digits, - and ."
        )
    return text


def labels(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Validate the labels of a pod or of a node selector."""
    for key, value in tree.items():
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is not a valid label key, such as pool or example.com/pool")
        if not isinstance(value, str):
            raise ValueError(f'{key}: {value!r} is not a string; write it in quotes: "{value}"')
        if not _VALUE.fullmatch(value):
            raise ValueError(
                f"{key}: {value!r} is not a valid label value; use up to 63 letters, digits, -, _ "
                "and ., with a letter or a digit first and last"
            )
    return tree


def toleration(tree: Any) -> Any:
    """Validate one toleration."""
    if not isinstance(tree, Mapping):
        raise ValueError(f"{tree!r} is not a toleration; write it as {{key: K, operator: Exists}}")
    for key, value in tree.items():
        if key not in _TOLERATION:
            hint = nearest(str(key), _TOLERATION) or f" (one of {', '.join(_TOLERATION)})"
            raise ValueError(f"{key!r} is not a field of a toleration{hint}")
        if key != "tolerationSeconds" and not isinstance(value, str):
            raise ValueError(f"{key}: {value!r} is not a string; write it in quotes")
    _check_choice("operator", tree.get("operator", ""), _OPERATORS)
    _check_choice("effect", tree.get("effect", ""), _EFFECTS)
    exists = tree.get("operator") == "Exists"
    if exists and tree.get("value"):
        raise ValueError("a toleration with the operator Exists has no value; leave value out")
    if not exists and not tree.get("key"):
        raise ValueError("a toleration without a key needs the operator Exists")
    if tree.get("key") and not _KEY.fullmatch(tree["key"]):
        raise ValueError(f"key: {tree['key']!r} is not a valid taint key")
    if not _VALUE.fullmatch(tree.get("value", "")):
        raise ValueError(f"value: {tree['value']!r} is not a valid taint value")
    if "tolerationSeconds" in tree:
        _check_seconds(tree)
    return tree


def tolerations(trees: list[Any]) -> list[Any]:
    """Validate a list of tolerations."""
    return [toleration(each) for each in trees]


def amount(text: str) -> Decimal:
    """Return a quantity as a number of bytes or of CPUs. Raises `ValueError`."""
    found = _QUANTITY.fullmatch(text)
    if not found:
        raise ValueError(
            f"{text!r} is not a Kubernetes quantity; write a number with a unit such as 500m, 4 or "
            "16Gi (m, k, M, G, T; Ki, Mi, Gi, Ti)"
        )
    number, unit = Decimal(found["number"]), found["unit"] or ""
    if unit.endswith("i"):
        return number * _BINARY[unit[0]]
    power = _DECIMAL[unit] if unit in _DECIMAL else int(unit[1:] or 0)
    return number * Decimal(f"1e{power}")


def _check_choice(what: str, word: str, allowed: tuple[str, ...]) -> None:
    if word and word not in allowed:
        hint = nearest(word, allowed) or f" (one of {', '.join(allowed)})"
        raise ValueError(f"{what}: {word!r} is unknown to Kubernetes{hint}")


def _check_seconds(tree: Mapping[str, Any]) -> None:
    seconds = tree["tolerationSeconds"]
    # KFP passes every number as a double, so a whole number may be a float.
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds % 1:
        raise ValueError(f"tolerationSeconds: {seconds!r} is not a whole number")
    if tree.get("effect") != "NoExecute":
        raise ValueError("tolerationSeconds needs the effect NoExecute")
