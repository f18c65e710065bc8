"""The process of a replay: one step's body, with the arguments in `replay.json` of a folder."""

from __future__ import annotations

import inspect
import json
import pdb
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

from components import contract
from components.table import RESOLVE
from trainer import mirror
from trainer.errors import RunInterruptedError
from trainer.user_code import frames_of


class OutputArtifact:
    """What KFP gives a step to describe an artifact; the UI that would draw it is not there."""

    def __init__(self, uri: str, path: Path) -> None:
        """Name the artifact, and the file that stands for it here."""
        self.uri, self.path, self.metadata = uri, str(path), dict[str, Any]()

    def log_confusion_matrix(self, *_given: Any) -> None:
        """Draw nothing."""

    def log_roc_curve(self, *_given: Any) -> None:
        """Draw nothing."""


def main() -> None:
    """Run the step that the folder `argv[1]` describes; with `debug`, stop where it fails."""
    folder = Path(sys.argv[1])
    tree = json.loads((folder / mirror.FILE).read_text(encoding="utf-8"))
    step, arguments = str(tree["step"]), dict(tree["arguments"])
    # The pipeline of the run was accepted by the code that ran it.
    sys.argv = [step, contract.OPTION, contract.mark()]
    try:
        _run(step, arguments, tree["artifacts"], folder)
    # A bug of Flotilla itself is raised as it is.
    except (Exception, SystemExit) as error:
        cause = error.__context__ if isinstance(error, SystemExit) else error
        # A person who ends a replay does not ask for the place.
        if tree["debug"] and cause and not isinstance(cause, RunInterruptedError):
            post_mortem(cause)
        raise


def _run(step: str, arguments: dict[str, Any], artifacts: Mapping[str, Any], folder: Path) -> None:
    place = folder / "artifacts"
    place.mkdir(exist_ok=True)
    made = {name: _artifact(name, said, place) for name, said in artifacts.items()}
    call = import_module(f"components.{step}").run_step
    if step == RESOLVE:
        call({**arguments, **made})
        return
    if "uri_path" in arguments:
        arguments["uri_path"] = str(place / "uri.txt")
    given = {**arguments, **made}
    taken = inspect.signature(call).parameters
    call(**{name: value for name, value in given.items() if name in taken})


def _artifact(name: str, said: Mapping[str, Any], place: Path) -> Any:
    if "state" in said:
        return SimpleNamespace(**said)
    path = place / name
    if said.get("tree") is not None:
        path.write_text(json.dumps(said["tree"]), encoding="utf-8")
    return OutputArtifact(str(said.get("uri", "")), path)


def post_mortem(error: BaseException) -> None:
    """Open pdb at the innermost frame of the user's code in an error, or where it was raised.

    `up` leads to what called it. The end of the input ends the debugger.
    """
    trace: TracebackType | None = None
    for frame, line in reversed(frames_of(error)):
        # What the user's code has called is left out: pdb begins at the last one.
        trace = TracebackType(trace, frame, frame.f_lasti, line)
    if trace is None:
        return
    debugger = pdb.Pdb(stdin=sys.stdin, stdout=sys.stderr)
    debugger.reset()
    debugger.interaction(None, trace)


if __name__ == "__main__":
    main()
