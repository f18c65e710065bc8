"""What a step was given: its arguments, what its artifacts said, and the code that ran.

It is written before the body of the step begins, at `<root>/<run id>/given/NAME.json`, or in the
folder of a run on this machine. From it alone a step that failed, or was killed, can be replayed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from components.locations import RUN_FOLDER
from trainer import storage, user_code
from trainer.errors import ConfigError, UserError
from trainer.events import now, to_tree
from trainer.json_records import from_tree, parse
from trainer.masking import masked
from trainer.promotion import lineage

FOLDER = "given"
_PLAIN = (str, int, float, bool, list, dict, type(None))
# The keys of the configuration that may name code of the user's.
_NAMES_CODE = (("data", "map"), ("model", "name"), ("task", "name"), ("task", "loss"))


@dataclass(frozen=True, kw_only=True)
class Given:
    """What one step was given, at its last start.

    Attributes:
        step: its name.
        began: seconds since 1970.
        arguments: the plain ones, by name.
        artifacts: the others: `uri`, and of an input `tree`, what its file says; of the final
            status of a run `state` and `error_message`.
        in_pod: whether it was a pod of a KFP instance.
        on_this_machine: whether it belonged to a run that the command line started.
        version: of Flotilla.
        commit: likewise, empty where it is not known.
        code: digest by name of each module of the user's that the configuration names.
    """

    step: str
    began: float
    arguments: Mapping[str, Any]
    artifacts: Mapping[str, Any] = field(default_factory=dict)
    in_pod: bool = False
    on_this_machine: bool = False
    version: str = ""
    commit: str = ""
    code: Mapping[str, str] = field(default_factory=dict)


def given_to(step: str, call: Mapping[str, Any]) -> Given:
    """Return the record of a step that begins now; `call` are its arguments by name."""
    call = {name: value for name, value in call.items() if not callable(value)}
    plain = {name: value for name, value in call.items() if isinstance(value, _PLAIN)}
    others = {name: _said(value) for name, value in call.items() if name not in plain}
    return Given(
        step=step,
        began=now(),
        arguments=plain,
        artifacts=others,
        in_pod=bool(os.environ.get("KFP_POD_NAME")),
        on_this_machine=bool(os.environ.get(RUN_FOLDER)),
        version=version("flotilla"),
        commit=lineage.commit(),
        code=digests(str(plain.get("config", ""))),
    )


def _said(value: Any) -> dict[str, Any]:
    if hasattr(value, "state"):
        return {"state": value.state, "error_message": value.error_message or ""}
    try:
        tree = parse(Path(value.path).read_bytes())
    except (OSError, ValueError, AttributeError):
        tree = None
    return {"uri": getattr(value, "uri", ""), "tree": tree}


def digests(config: str) -> dict[str, str]:
    """Return the digest of each module of the user's that a configuration, as JSON, names.

    None where they are in a bundle: its URI has the digest of them all.
    """
    try:
        tree = json.loads(config)
        if tree.get("code"):
            return {}
        names = [str(tree[section].get(key, "")) for section, key in _NAMES_CODE]
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}
    found = {}
    for module in sorted({name.partition(":")[0] for name in names if ":" in name}):
        try:
            found[module] = user_code.digest("code", module)
        except ConfigError:
            # The step itself says so.
            found[module] = ""
    return found


def write(given: Given, at: str) -> None:
    """Write the record below the URI of the run, or in the run's folder where that is empty.

    Raises:
        UserError: the store cannot be written.
    """
    text = masked(json.dumps(to_tree(given), indent=2, default=str))
    folder = os.environ.get(RUN_FOLDER)
    if at or folder:
        uri = at or storage.uri_of(folder or "")
        storage.write_bytes(storage.join(uri, FOLDER, f"{given.step}.json"), text.encode())


def read(at: str, step: str) -> Given | None:
    """Return what a step of the run at a URI was given; None where it never began.

    Raises:
        UserError: the record is damaged, or the store cannot be read.
    """
    uri = storage.join(at, FOLDER, f"{step}.json")
    try:
        found = from_tree(Given, parse(storage.read_bytes(uri)))
    except storage.Missing:
        return None
    except ValueError:
        found = None
    if found is None:
        raise UserError(f"{uri} is damaged: {step} of this run cannot be replayed")
    return found
