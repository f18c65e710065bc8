"""Run a module in a child process, and return the child's answer or raise its error.

The answer is the last line of output that is a JSON object. An error is the last line that starts
with `flotilla: `. The child exits when its parent exits.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flotilla.trainer.cluster import forks
from flotilla.trainer.cluster.forks import Request
from flotilla.trainer.runtime import signals, user_code
from flotilla.trainer.runtime.errors import DONE, UserError

_PREFIX = "flotilla: "


class ChildError(UserError):
    """The child process ended without an answer. The message is the child's last error line.

    The exit code `code` is 0 if the process took too long or was killed.
    """

    code = 0


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child of this process. `variables` take precedence."""
    own = {**signals.parent_environment(), **user_code.environment()}
    return {**os.environ, **own, **(variables or {})}


def start(
    module: str, *arguments: str, variables: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGUMENTS`. `options` are passed to `subprocess.Popen`."""
    given = {"env": environment(variables), "stdin": subprocess.DEVNULL, **options}
    return subprocess.Popen([sys.executable, "-m", module, *arguments], **given)


def end(process: subprocess.Popen[Any], seconds: float) -> None:
    """End a running process with SIGTERM or, after `seconds`, with SIGKILL."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def call(
    module: str,
    *arguments: str,
    config: str,
    seconds: float,
    variables: Mapping[str, str],
    loads: str = "",
) -> dict[str, Any]:
    """Call a module with a configuration, and return its answer. Raises `ChildError`.

    The module gets `--config FILE` and `--workdir DIR`, a temporary folder. If the fork server of
    the run has loaded the module `loads`, that server forks the process.
    """
    with tempfile.TemporaryDirectory(prefix="flotilla-", ignore_cleanup_errors=True) as folder:
        path, log = Path(folder, "config.json"), Path(folder, "output.txt")
        path.write_text(config, encoding="utf-8")
        words = [*arguments, "--config", str(path), "--workdir", folder]
        wanted = Request(
            command=[sys.executable, "-m", module, *words],
            loaded=loads,
            folder=os.getcwd(),
            environment=environment(variables),
        )
        with log.open("ab") as output:
            process = forks.start_process(wanted, output.fileno())
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ChildError(f"no response after {seconds:g} s") from None
        finally:
            process.kill()
            process.wait()
        said = log.read_text(encoding="utf-8", errors="replace")
    return answer(code, said, said)


def answer(code: int, out: str, errors: str) -> dict[str, Any]:
    """Return the answer of a process that ended with `code`. Raises the errors of `call`."""
    if code != DONE:
        raise failure(code, errors)
    last = [line for line in out.splitlines() if line.startswith("{")][-1]
    found: dict[str, Any] = json.loads(last)
    return found


def failure(code: int, errors: str) -> ChildError:
    """Return the error of a process that ended with `code`, from the lines in `errors`."""
    if code < 0:
        name = signal.Signals(-code).name
        return ChildError(f"terminated by {name}; check whether there is enough memory")
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    said = [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX)]
    error = ChildError((said or lines or [f"exit code {code}"])[-1])
    error.code = code
    return error
