"""Runs the steps of a local run in forked processes.

KFP's runner starts a Python process for each step, which imports KFP and TensorFlow again. Here a
fork server imports them once per run. If it cannot fork, the runner starts processes as usual.
"""

from __future__ import annotations

import builtins
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flotilla.components import kfp_internals
from flotilla.components.table import STEPS
from flotilla.trainer.cluster import fork_server, forks
from flotilla.trainer.cluster.forks import Request
from flotilla.trainer.cluster.process import MODULES
from flotilla.trainer.runtime import signals
from flotilla.trainer.runtime.tensorflow_import import has_gpus

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


@dataclass(frozen=True, kw_only=True)
class _Addresses:
    """The addresses of a run's fork servers; `tensorflow` is empty if none imports TensorFlow."""

    steps: str
    tensorflow: str


@contextmanager
def forking(folder: Path, pipeline: str) -> Iterator[Callable[[], None]]:
    """Run a fork server during this block if possible. Yield a function that makes KFP use it."""
    asked = os.environ.pop(forks.VARIABLE, "")
    if asked == forks.NONE or not _is_possible():
        yield lambda: None
        return
    steps = [f"flotilla.components.{step.name}" for step in STEPS]
    # If there are GPUs, do not import TensorFlow in the server, because a process that was forked
    # after a GPU was initialized cannot use the GPU.
    later = pipeline in TRAINING and not has_gpus()
    name = f"flotilla-{secrets.token_hex(8)}"
    addresses = _Addresses(steps=name, tensorflow=f"{name}.tf" if later else "")
    with _server(
        folder, addresses, [*kfp_internals.EXECUTOR_MODULES, *steps], _LATER if later else ()
    ):
        if later:
            os.environ[forks.VARIABLE] = addresses.tensorflow
        try:
            fork = partial(_run_forked, addresses)
            yield partial(kfp_internals.replace_local_runner, fork)
        finally:
            os.environ.pop(forks.VARIABLE, None)


def _is_possible() -> bool:
    # Do not fork under a debugger or tracer, which would not follow the forked process.
    return sys.platform == "linux" and _has_descriptors_of_processes() and sys.gettrace() is None


def _has_descriptors_of_processes() -> bool:
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
    folder: Path, addresses: _Addresses, at_once: Sequence[str], later: Sequence[str]
) -> Iterator[None]:
    with ExitStack() as sockets:
        listeners = [
            sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            for _ in range(2)
        ]
        for listener, name in zip(
            listeners, (addresses.steps, f"{addresses.steps}.tf"), strict=True
        ):
            listener.bind(f"\0{name}")
            listener.listen(fork_server.BACKLOG)
        numbers = [listener.fileno() for listener in listeners]
        named = ":".join(map(str, numbers))
        process = subprocess.Popen(
            [
                sys.executable, "-m", fork_server.__name__, str(folder), named,
                ",".join(at_once), ",".join(later),
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
    addresses: _Addresses, full_command: Sequence[str], env_vars: Mapping[str, str]
) -> int | None:
    """Run a step in a forked process. Return its exit code, or None if it could not be forked."""
    step = kfp_internals.parse_command(full_command)
    if step is None or step.name not in _OF_STEPS:
        return None
    module = _OF_STEPS[step.name]
    address = addresses.tensorflow if module else addresses.steps
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
