"""What a run has cost: the tasks and GPUs that training held, by the time it held them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainer.topology import topology_of


def held_by(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a training cluster of this configuration holds: `tasks` of each role, `gpus`."""
    cluster = config["cluster"]
    tasks = topology_of(config["training"]["strategy"]).tasks(
        servers=cluster["parameter_servers"], workers=cluster["workers"]
    )
    return {"tasks": tasks, "gpus": cluster["gpus_per_worker"] * tasks.get("worker", 1)}


def spent(step: Mapping[str, Any]) -> float:
    """Return the seconds of a step, its earlier tries included."""
    return float(step["seconds"] + step.get("earlier_seconds", 0.0))


def cost(config: Mapping[str, Any], steps: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the cost of a run by the records of its steps; nothing where it never trained.

    Args:
        config: the run's configuration; empty where it is not known.
        steps: the records; that of training may say itself what it held.
    """
    steps = list(steps)
    train = next((step for step in steps if step["step"] == "train_model"), {})
    held = train.get("held") or (held_by(config) if config else {})
    if not (train and held):
        return {}
    seconds = spent(train)
    return {
        "tasks": held["tasks"],
        "task_hours": sum(held["tasks"].values()) * seconds / 3600,
        "gpu_hours": held["gpus"] * seconds / 3600,
        "seconds_of_all_steps": round(sum(map(spent, steps)), 1),
    }
