"""The section `program`: a user's own training program, used instead of the trainer.

Flotilla starts the program in every task of the cluster, gives it the data and the cluster's
addresses, and publishes the checkpoints and the model that it writes. A word such as `{index}` in
the command or the environment is a placeholder. Any other brace is kept.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from flotilla.trainer.config.base import MOST, Whole, key, suggest
from flotilla.trainer.config.topology import ROLES, Topology, find_topology
from flotilla.trainer.runtime.masking import names_secret

EVALUATE = "evaluate"
#: The names of placeholders that may appear in braces in a command or an environment variable.
PLACEHOLDERS = (
    "role", "index", "task_index", "ps_hosts", "worker_hosts", "chief_hosts", "num_ps",
    "num_workers", "gpu", "dataset", "dataset_files", "checkpoints", "model", "logs", "metrics",
    "steps", "batch_size", "seed",
)  # fmt: skip
_LISTED = ("ps", "worker", "chief")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The text that is shown in place of a value that may be a secret.
_HIDDEN = "(hidden)"
# A value that is not a secret: a number, a switch, or a path, even of a file with a secret.
_PUBLIC = re.compile(r"|\d{1,6}|true|false|[./{].*", re.IGNORECASE | re.DOTALL)
_GIVEN = re.compile(r"TF_CONFIG|FLOTILLA_\w*")
#: For each section, the keys that have no effect with a program. No key of the section `model` has
#: an effect either.
_OWN = {
    "training": (
        "accumulate", "optimizer", "schedule", "pull_every", "replicas_to_aggregate",
        "checkpoint_parts_mb", "patience", "mixed_precision", "jit_compile", "warm_start", "ema",
        "freeze", "class_weights", "profile", "callbacks",
    ),
    "data": ("disk",),
    "cluster": ("placement", "existing_servers", "in_process", "recovery"),
}  # fmt: skip


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders in a string. Raises `ValueError` for an unknown one."""
    return _PLACEHOLDER.sub(lambda found: _look_up(found[1], values), text)


def task_values(
    training: Any, role: str, index: str, addresses: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return the values of placeholders for the task, the cluster and the training length."""
    return {
        **{f"{each}_hosts": ",".join(addresses.get(each, ())) for each in _LISTED},
        "role": role,
        "index": index,
        "task_index": index,
        "num_ps": str(len(addresses.get("ps", ()))),
        "num_workers": str(len(addresses.get("worker", ()))),
        "steps": str(training.steps),
        "batch_size": str(training.batch_size),
        "seed": str(training.seed),
    }


def _look_up(name: str, values: Mapping[str, str]) -> str:
    if name not in values:
        raise ValueError(f"there is no placeholder {{{name}}}{suggest(name, sorted(values))}")
    return values[name]


def _check(text: str) -> str:
    if "\0" in text:
        raise ValueError("it contains a NUL character")
    fill(text, dict.fromkeys(PLACEHOLDERS, ""))
    return text


Template = Annotated[str, AfterValidator(_check)]
Tasks = Annotated[int, Field(ge=1, le=10_000)]


class ProgramConfig(Whole):
    """A user's training program, which trains its own model."""

    command: tuple[Template, ...] = key(
        (), "command of the program, such as [python, train.py]; empty: Flotilla's own trainer"
    )
    roles: dict[str, Tasks] = key(
        {}, "number of tasks per role, such as {worker: 2, ps: 1}; empty: as in training.strategy"
    )
    working_dir: str = key(
        "",
        "working folder of the program; empty: the current folder on this machine, or the image's "
        "default in a pod",
    )
    env: dict[str, Template] = key({}, "environment variables of the program")
    data: Literal["files", "uri"] = key(
        "files",
        "files: each task gets its part of the dataset as files; uri: each task gets only the "
        "dataset's URI",
    )
    checkpoint_marker: str = key(
        "",
        "name of the file that the program writes last into a checkpoint's folder; empty: "
        "checkpoints are recognized by their layout",
    )
    stall_timeout: float = key(
        0, "seconds without a step or output after which the program restarts; 0: never", ge=0,
        le=MOST,
    )  # fmt: skip
    python: str = key(
        # The default is not `python3`, because KFP's local runner replaces that text in parameters.
        "python",
        "command of Python 3.8 or later in the image, to start the program; empty: there is none",
    )
    after_training: Literal["stop", "evaluate"] = key(
        "stop",
        "stop: the run ends after training; evaluate: the program's model is evaluated, exported "
        "and registered",
    )
    outputs: Literal["auto", "probabilities", "logits"] = key(
        "auto", "what a classifier returns; auto: detected from its outputs"
    )

    def topology(self) -> Topology | None:
        """Return the topology that `roles` describe, or None if there are none."""
        if not self.roles:
            return None
        return Topology(
            implementation="",
            chief="chief" in self.roles,
            servers="ps" in self.roles,
            workers="worker" in self.roles,
            counts={role: n for role, n in self.roles.items() if role != "evaluator"},
        )

    @field_validator("command")
    @classmethod
    def _begins_with_program(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if value and not value[0].strip():
            raise ValueError("the first element, the program, is empty")
        return value

    @field_validator("roles")
    @classmethod
    def _known_roles(cls, value: dict[str, int]) -> dict[str, int]:
        for role, count in value.items():
            if role not in ROLES:
                raise ValueError(f"there is no role {role!r}{suggest(role, ROLES)}")
            if role in ("chief", "evaluator") and count > 1:
                raise ValueError(
                    f"{count} tasks have the role {role}; at most one task may have it"
                )
        if value and not {"chief", "worker"} & value.keys():
            raise ValueError("there is no leading task; add the role chief or worker")
        return value

    @field_validator("env")
    @classmethod
    def _free_names(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} is not a valid name for an environment variable")
            if _GIVEN.fullmatch(name):
                raise ValueError(f"{name} is set by Flotilla; choose another name")
            if names_secret(name) and not _PUBLIC.fullmatch(text):
                raise ValueError(
                    f"{name} looks like a secret, and a run records this value; instead, set it in "
                    "the environment of flotilla, which the program inherits, or in "
                    "cluster.kubernetes.pod.secret_env"
                )
        return value

    @field_validator("checkpoint_marker")
    @classmethod
    def _file_name(cls, value: str) -> str:
        if "/" in value or value in (".", ".."):
            raise ValueError(f"{value!r} is not allowed; give a file name without a folder")
        return value


def hide_environment(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the values of `program.env`, which may be secrets."""
    program = config.get("program")
    if not isinstance(program, Mapping) or not isinstance(program.get("env"), Mapping):
        return dict(config)
    return {**config, "program": {**program, "env": dict.fromkeys(program["env"], _HIDDEN)}}


def describe_program(config: Mapping[str, Any]) -> str:
    """Describe the command of a configuration's program, or return an empty string."""
    program = config.get("program")
    command = program.get("command") if isinstance(program, Mapping) else None
    return f"program {shlex.join(map(str, command))}" if command else ""


def count_tasks(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of tasks of each role, the chief last, for a configuration as plain data.

    Raises `KeyError`, `TypeError` or `ValueError` if fields are missing or invalid.
    """
    roles = own_roles(config)
    if roles:
        return {role: int(roles[role]) for role in ("ps", "worker", "chief") if role in roles}
    cluster = config["cluster"]
    return find_topology(config["training"]["strategy"]).tasks(
        servers=int(cluster["parameter_servers"]), workers=int(cluster["workers"])
    )


def own_roles(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the roles that a configuration's program sets, or {} if the strategy sets them."""
    program = config.get("program")
    own = program.get("roles") if isinstance(program, Mapping) and program.get("command") else None
    return own if isinstance(own, Mapping) else {}


def refuse_own_keys(sections: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if keys of the built-in trainer are set together with a program."""
    own = {"model": tuple(type(sections["model"]).model_fields), **_OWN}
    changed = [
        f"{section}.{name}"
        for section, names in own.items()
        for name in names
        if _is_changed(sections[section], name)
    ]
    if changed:
        raise ValueError(
            f"{changed[0]}: it has no effect on program.command, which trains its own model; leave "
            "it out"
        )


def _is_changed(section: Any, name: str) -> bool:
    default = type(section).model_fields[name].get_default(call_default_factory=True)
    return bool(getattr(section, name) != default)


def refuse_without_command(program: ProgramConfig) -> None:
    """Raise a `ValueError` if other keys of a program are set without a command."""
    if not program.command and program != ProgramConfig():
        name = next(each for each in program.model_fields_set if _is_changed(program, each))
        raise ValueError(f"program.{name}: it has no effect without program.command; leave it out")
