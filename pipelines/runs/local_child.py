"""The process of a local run. It is separate because KFP's local runner patches `print`.

KFP's runner starts a Python process for each step, which imports KFP and TensorFlow again. Here a
fork server imports them once per run. If it cannot fork, the runner starts processes as usual.
"""

from __future__ import annotations

import builtins
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from flotilla.components import kfp_internals
from flotilla.components.records.record import STOPPING
from flotilla.components.table import FIRST_STAGE, STEPS
from flotilla.trainer import events
from flotilla.trainer.cluster import fitting, forks
from flotilla.trainer.cluster.forks import Request
from flotilla.trainer.cluster.process import MODULES
from flotilla.trainer.config.form import from_form
from flotilla.trainer.events.run_state import reduce_events
from flotilla.trainer.runtime import signals
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.runtime.tensorflow_import import has_gpus

EVENTS = "events.jsonl"
_OF_STEPS = {step.name: step.loads for step in STEPS}
# The modules to import, in the order in which a run needs them.
_LATER = (
    # The agent of a program is first, because it does not need TensorFlow.
    MODULES["program"],
    "tensorflow",
    *dict.fromkeys(MODULES.values()),
    *dict.fromkeys(filter(None, _OF_STEPS.values())),
)
# The pipelines that train, and therefore need TensorFlow.
TRAINING = ("run", "train", "train_on")
_SECONDS_TO_END = 5.0
_SECONDS_TO_BEGIN, _PAUSE = 60.0, 0.1
_is_over = threading.Event()


def main() -> None:
    """Run pipeline `argv[1]` with the arguments in the folder `argv[-1]`.

    A resumed run has the argument `resumed` before the folder.
    """
    name, *is_resumed, folder = *sys.argv[1:-1], Path(sys.argv[-1])
    signals.end_with_parent()
    # The steps read the PID of this process from the environment, because their parent is a shell.
    os.environ.update(signals.parent_environment())
    # The signal ends the running step; this process continues with the exit step.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _no_further_step)
    # The runner inserts the interpreter's path unquoted into a shell command, and replaces the word
    # `python3` by this path in every parameter value. Therefore set the path to `python3`.
    path = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{path}"
    sys.executable = "python3"
    arguments = json.loads((folder / "arguments.json").read_text(encoding="utf-8"))
    with forking(folder, name) as fork_steps:
        # Import KFP while the fork server loads its modules.
        kfp_internals.load_without_client()
        fork_steps()
        if name in TRAINING:
            _begin_trial(folder, arguments, is_resumed=bool(is_resumed))
        try:
            _run(name, folder, arguments)
        finally:
            _is_over.set()
    events.emit(events.RunEnd())


def _begin_trial(folder: Path, arguments: Mapping[str, Any], *, is_resumed: bool) -> None:
    """Start a dry run of the model in parallel with the steps. An error ends the run."""
    config = from_form(arguments)
    if is_resumed:
        # A resumed run starts from its own checkpoints, so do not test the warm start.
        training = config.training.model_copy(update={"warm_start": ""})
        config = config.model_copy(update={"training": training})
    began = time.monotonic()

    def end(error: ConfigError) -> None:
        if STOPPING in os.environ or not _await_first_stage(folder):
            return
        os.environ[STOPPING] = "1"
        events.emit(
            events.StepEnd(
                step=FIRST_STAGE,
                status="failed",
                exit_code=error.exit_code,
                error=str(error),
                seconds=round(time.monotonic() - began, 2),
            )
        )
        os.killpg(os.getpgrp(), signal.SIGTERM)

    fitting.begin(config, arguments.get("dataset", ""), end, _is_over.is_set)


def _await_first_stage(folder: Path) -> bool:
    """Wait for the first stage to end, and return False if a stage failed or the wait timed out.

    After a failure, the dry run must not repeat an error that a task may have reported.
    """
    until = time.monotonic() + _SECONDS_TO_BEGIN
    while time.monotonic() < until:
        found = reduce_events(events.read(folder / EVENTS), newest_start=True)
        ends = {each.step: each.end for each in found.tries if each.end}
        if any(each.status == "failed" for each in ends.values()):
            return False
        if FIRST_STAGE in ends:
            return True
        time.sleep(_PAUSE)
    return False


def _run(name: str, folder: Path, arguments: Mapping[str, Any]) -> None:
    from kfp import local  # noqa: PLC0415

    from flotilla.pipelines.training import PIPELINES  # noqa: PLC0415

    local.init(
        runner=local.SubprocessRunner(use_venv=False),
        pipeline_root=str(folder / "kfp"),
        raise_on_error=True,
    )
    PIPELINES[name](**arguments)


def _no_further_step(_number: int, _frame: FrameType | None) -> None:
    # The signal may arrive between two steps; then the next step reads the variable.
    if STOPPING not in os.environ:
        os.environ[STOPPING] = "1"
        events.emit(events.Interrupted())


@contextmanager
def forking(folder: Path, pipeline: str) -> Iterator[Callable[[], None]]:
    """Run a fork server during this block if possible. Yield a function that makes KFP use it."""
    asked = os.environ.pop(forks.VARIABLE, "")
    # Do not fork under a debugger or tracer, which would not follow the forked process.
    if asked == forks.NONE or sys.gettrace() or not _has_descriptors_of_processes():
        yield lambda: None
        return
    steps = [f"flotilla.components.{step.name}" for step in STEPS]
    # If there are GPUs, do not import TensorFlow in the server, because a process that was forked
    # after a GPU was initialized cannot use the GPU.
    later = pipeline in TRAINING and not has_gpus()
    name = f"flotilla-{secrets.token_hex(8)}"
    of_tensorflow = f"{name}.tf" if later else ""
    at_once = [*kfp_internals.EXECUTOR_MODULES, *steps]
    with _server(folder, name, at_once, _LATER if later else ()):
        if later:
            os.environ[forks.VARIABLE] = of_tensorflow
        try:
            fork = partial(_run_forked, name, of_tensorflow)
            yield partial(kfp_internals.replace_local_runner, fork)
        finally:
            os.environ.pop(forks.VARIABLE, None)


def _has_descriptors_of_processes() -> bool:
    if sys.platform != "linux":
        return False
    # Try a process descriptor, because some containers forbid them.
    try:
        own = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return False
    try:
        signal.pidfd_send_signal(own, 0)
    except OSError:
        return False
    finally:
        os.close(own)
    return True


@contextmanager
def _server(
    folder: Path, name: str, at_once: Sequence[str], later: Sequence[str]
) -> Iterator[None]:
    """Run the fork server, which listens at `name` and at `name`.tf."""
    with socket.socket(socket.AF_UNIX) as steps, socket.socket(socket.AF_UNIX) as of_tensorflow:
        for listener, address in ((steps, name), (of_tensorflow, f"{name}.tf")):
            listener.bind(f"\0{address}")
            listener.listen(forks.BACKLOG)
        numbers = [steps.fileno(), of_tensorflow.fileno()]
        process = subprocess.Popen(
            [
                sys.executable, "-m", forks.__name__, str(folder),
                ":".join(map(str, numbers)), ",".join(at_once), ",".join(later),
            ],
            env=_environment(),
            stdin=subprocess.PIPE,
            pass_fds=numbers,
        )  # fmt: skip
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    return {
        # Give the server the environment of the tasks, because TensorFlow reads it on import.
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "GRPC_EXPERIMENTS": "tcp_frame_size_tuning",
        **os.environ,
        **signals.parent_environment(),
        "GRPC_FAIL_FAST": "use_caller",
        kfp_internals.RUNTIME: "true",
    }


def _run_forked(
    steps: str, of_tensorflow: str, full_command: Sequence[str], env_vars: Mapping[str, str]
) -> int | None:
    """Run a step in a forked process. Return its exit code, or None if it could not be forked.

    `steps` and `of_tensorflow` are the addresses of the fork servers. `of_tensorflow` is empty if
    none imports TensorFlow.
    """
    step = kfp_internals.parse_command(full_command)
    if step is None or step.name not in _OF_STEPS:
        return None
    module = _OF_STEPS[step.name]
    address = of_tensorflow if module else steps
    if not address:
        return None
    source = Path(tempfile.mkdtemp(), "ephemeral_component.py")
    source.write_text(step.source, encoding="utf-8")
    wanted = Request(
        command=step.with_source(source),
        loaded=module or f"flotilla.components.{step.name}",
        folder=os.getcwd(),
        environment={**os.environ, **env_vars, kfp_internals.RUNTIME: "true"},
    )
    reader, writer = os.pipe()
    try:
        process = forks.fork(address, wanted, writer)
    finally:
        os.close(writer)
    with open(reader, encoding="utf-8", errors="replace") as lines:
        if process is None:
            return None
        # Use `print`, which the runner has patched to indent the output of a step.
        for line in lines:
            builtins.print(line, end="")  # noqa: T201
    builtins.print("\n")  # noqa: T201
    return process.wait()


if __name__ == "__main__":
    main()
