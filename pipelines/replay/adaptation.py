"""What a step is given here in place of what it had: fewer machines, and nothing that it may end.

Every difference that can matter is a remark.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from components.records.given import Given, digests
from components.table import EXIT_STEP, RESOLVE, TRAIN
from trainer import cores
from trainer.config.run_parameters import run_parameters
from trainer.errors import UserError
from trainer.promotion import lineage

_MOST_SERVERS = 2


def arguments_of(given: Given, *, debug: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of the step for this machine, and a remark on each difference."""
    arguments, remarks = dict(given.arguments), list[str]()
    if given.step == EXIT_STEP.name:
        # The jobs of the run are no part of a replay.
        arguments["launcher"] = "local"
    if given.step == TRAIN:
        tree = json.loads(arguments["config"])
        remarks = _on_this_machine(tree, debug=debug)
        arguments["config"] = json.dumps(tree)
    return arguments, remarks


def require_arguments(given: Given) -> None:
    """Raise a `UserError` where the step of this version takes what it was not given then."""
    if given.step == RESOLVE:
        needed = {each.name for each in run_parameters()}
    else:
        taken = inspect.signature(import_module(f"components.{given.step}").run_step).parameters
        needed = {name for name, each in taken.items() if each.default is each.empty}
    if missing := sorted(needed - {*given.arguments, *given.artifacts}):
        raise UserError(
            f"{given.step} of Flotilla {version('flotilla')} also takes {', '.join(missing)}, and "
            f"the run was made by {given.version}: replay it with the version of the run"
        )


def _on_this_machine(tree: dict[str, Any], *, debug: bool) -> list[str]:
    cluster, training, remarks = tree["cluster"], tree["training"], list[str]()
    if cluster["launcher"] != "local":
        remarks.append("training runs as processes of this machine, not as a job of Kubernetes")
    if cluster["existing_servers"]:
        cluster["existing_servers"] = False
        remarks.append("the servers that ran already are started here")
    if debug and training["strategy"] != "single":
        remarks.append(
            f"for the debugger the strategy is single, in one process, not {training['strategy']}"
        )
        training["strategy"] = "single"
        cluster["evaluator"] = False
        # The first as many of as many: one gradient is one update.
        training["replicas_to_aggregate"] = 0
    if cluster["gpus_per_worker"] and not _has_gpus():
        remarks.append(f"no GPU is here, of {cluster['gpus_per_worker']} for each worker")
        cluster["gpus_per_worker"] = 0
    if training["strategy"] == "single":
        return remarks
    most = {"workers": max(cores.usable(), 2), "parameter_servers": _MOST_SERVERS}
    for name, limit in most.items():
        if cluster[name] > limit:
            remarks.append(f"{limit} {name.replace('_', ' ')} run here, of {cluster[name]}")
            cluster[name] = limit
    needed = training["replicas_to_aggregate"]
    training["replicas_to_aggregate"] = min(needed, cluster["workers"])
    return remarks


def _has_gpus() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def code_remark(given: Given) -> str:
    """Return in which way the code here is not that of the step, or an empty text."""
    here = {"version": version("flotilla"), "commit": lineage.commit()}
    then = {"version": given.version, "commit": given.commit}
    differs = [
        f"{name} {_word(here[name])} and not {_word(then[name])}"
        for name in here
        if here[name] != then[name] and (then[name] or name == "version")
    ]
    differs += _modules(given.code, digests(str(given.arguments.get("config", ""))))
    return f"the code differs: {'; '.join(differs)}" if differs else ""


def _word(text: str) -> str:
    return text.removesuffix("-dirty")[:12] + ("-dirty" * text.endswith("-dirty")) or "unknown"


def _modules(then: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    return [
        f"module {name} {'was changed since' if here.get(name) else 'is not found here'}"
        for name, digest in then.items()
        if digest and here.get(name) != digest
    ]
