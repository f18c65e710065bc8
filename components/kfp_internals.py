"""All uses of private names of the KFP SDK, which KFP may rename without notice.

Functions import KFP only when they need it, because running steps also load this module.
`tests/components/test_kfp_internals.py` tests each name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

#: If this variable is set, importing KFP loads only the modules that a running step needs.
RUNTIME = "_KFP_RUNTIME"
_EXECUTOR = "kfp.dsl.executor_main"
EXECUTOR_MODULES = ("kfp.dsl.executor", "kfp.dsl.kfp_config", "kfp.dsl.utils")
# Indexes in a command of KFP's local runner: shell script, component source, first argument.
_SHELL, _SOURCE, _ARGUMENTS = 2, 3, 4
RunCommand = Callable[[list[str], Mapping[str, str]], int | None]


def add_arguments(component: Any, arguments: Sequence[str]) -> None:
    """Add arguments to the command of a component. Do nothing inside a running step."""
    if hasattr(component, "component_spec"):
        component.component_spec.implementation.container.args += arguments


def load_without_client() -> None:
    """Import KFP without its client and the Kubernetes client, which are slow to import."""
    os.environ[RUNTIME] = "true"
    import_module("kfp")
    del os.environ[RUNTIME]


@dataclass(frozen=True, kw_only=True)
class StepCommand:
    """The parts of the command with which KFP's local runner starts a step."""

    name: str
    source: str
    arguments: tuple[str, ...]

    def with_source(self, file: Path) -> list[str]:
        """Return a command that runs the step from a file with its source."""
        return ["python3", "-m", _EXECUTOR, "--component_module_path", str(file), *self.arguments]


def parse_command(command: Sequence[str]) -> StepCommand | None:
    """Parse a command with which KFP's local runner starts a step; None for other commands."""
    if len(command) <= _ARGUMENTS or _EXECUTOR not in command[_SHELL]:
        return None
    arguments = tuple(command[_ARGUMENTS:])
    name = arguments[arguments.index("--function_to_execute") + 1]
    return StepCommand(name=name, source=command[_SOURCE], arguments=arguments)


def replace_local_runner(run: RunCommand) -> None:
    """Make KFP's local runner start its steps with `run`.

    If `run` returns None, the local runner starts the step itself.
    """
    # Import KFP's runner only when it is needed, because the import takes a second.
    from kfp.local import subprocess_task_handler

    before = subprocess_task_handler.run_local_subprocess

    def run_local_subprocess(
        full_command: list[str], env_vars: Mapping[str, str] | None = None
    ) -> Any:
        code = run(full_command, env_vars or {})
        return before(full_command, env_vars) if code is None else code

    subprocess_task_handler.run_local_subprocess = run_local_subprocess


def make_client_type() -> Any:
    """Return a class of KFP clients whose constructor reads no file and sends no request.

    A subclass must define `make_configuration`, which returns the client's configuration.
    """
    from kfp.client import Client

    class OwnClient(Client):  # type: ignore[misc]
        """A client whose configuration comes from its subclass."""

        def _load_config(self, *_ignored: object) -> Any:
            return self.make_configuration()

        def _load_context_setting_or_default(self) -> None:
            # If the namespace were empty, the constructor would send a request without a timeout.
            self._context_setting = {"namespace": "-"}

        def set_user_namespace(self, namespace: str) -> None:
            """Set the namespace of this client without saving it to a file."""
            self._context_setting["namespace"] = namespace

        @property
        def requests(self) -> Any:
            """The API client that sends all requests."""
            return self._healthz_api.api_client

    return OwnClient
