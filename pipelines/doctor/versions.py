"""The versions with which Flotilla was run; `docs/reference/versions.md` shows this table."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipelines.doctor.examination import Finding

_NUMBER = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A program that Flotilla runs with: the `oldest` version, if known, and those `seen`."""

    name: str
    oldest: str = ""
    seen: tuple[str, ...]


KFP = Part(name="Kubeflow Pipelines", oldest="2.17", seen=("2.17.0",))
ARGO = Part(name="Argo Workflows", seen=("4.0.5",))
OPERATOR = Part(name="training operator", oldest="1.9", seen=("1.9.3", "1.9.4"))
# Before 0.9 its pods do not say to which JobSet they belong: they lack the label of its uid.
JOBSET = Part(name="JobSet", oldest="0.9", seen=("0.12.0",))
KUBERNETES = Part(name="Kubernetes", seen=("1.33",))
KUBECTL = Part(name="kubectl", oldest="1.27", seen=("1.32",))
PYTHON = Part(name="Python", oldest="3.11", seen=("3.11",))
TENSORFLOW = Part(name="TensorFlow", oldest="2.21", seen=("2.21.0",))
PARTS = (KFP, ARGO, OPERATOR, JOBSET, KUBERNETES, KUBECTL, PYTHON, TENSORFLOW)


def judged(part: Part, version: str, message: str, show: str = "") -> Finding:
    """Return the finding for a part of this version; a version that is too old is a warning."""
    number = _NUMBER.match(version)
    if not number:
        return Finding("ok", message)
    if part.oldest and _tuple(version) < _tuple(part.oldest):
        words = f"{message}; {part.name} has to be {part.oldest} or later"
        return Finding("warn", words, show)
    if any(_tuple(version)[: len(_tuple(each))] == _tuple(each) for each in part.seen):
        return Finding("ok", message)
    return Finding("ok", f"{message}; not run with this version, but with {', '.join(part.seen)}")


def _tuple(version: str) -> tuple[int, ...]:
    found = _NUMBER.match(version)
    return tuple(int(each) for each in found.groups() if each) if found else ()
