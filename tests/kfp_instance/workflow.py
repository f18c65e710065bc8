"""A run as an instance tells of it: the nodes of its Argo workflow, and the logs of its pods.

A step is a driver, a group of its own name and a pod named executor in it; what was not begun has
no node, and what a condition leaves out is skipped. Of what comes from the cache the driver and the
group succeed: the template of the group has its pod skipped (`when: cached-decision != true`), and
Argo names the pod that never was all the same. It reports inputs and outputs of no node.
"""

from __future__ import annotations

import itertools
import json
import logging
from datetime import UTC, datetime, timedelta
from typing import Any

from trainer import events
from trainer.events import Event, StepBegin, StepEnd

WORKFLOW = "flotilla-training-x7z2p"
BEGIN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def moment(second: int) -> str:
    return f"{BEGIN + timedelta(seconds=second):%Y-%m-%dT%H:%M:%SZ}"


class Workflow:
    """The nodes of one run; each change is a second later than the one before."""

    def __init__(self, run_id: str, *, names_pods: bool = True) -> None:
        self.run_id = run_id
        self.names_pods = names_pods
        self.nodes: list[dict[str, Any]] = []
        self.logs: dict[str, str] = {}
        self.cancelled = False
        self._numbers = itertools.count(1000000000)
        self._seconds = itertools.count()
        for name in (WORKFLOW, "root-driver", "root", "exit-handler-1-driver", "exit-handler-1"):
            self._node(name, "system-dag", "RUNNING")

    def begin(self, step: str) -> None:
        name = step.replace("_", "-")
        self._node(f"{name}-driver", "system-container-driver", "SUCCEEDED")
        self._node(name, "system-container-executor", "RUNNING")
        self.logs[self._add_executor(name, "RUNNING")["_pod"]] = ""

    def take_from_cache(self, step: str) -> None:
        name = step.replace("_", "-")
        self._node(f"{name}-driver", "system-container-driver", "SUCCEEDED")
        group = self._node(name, "system-container-executor", "RUNNING")
        executor = self._add_executor(name, "SKIPPED")
        # Argo does all three in one look at the workflow.
        group["state"] = "SUCCEEDED"
        executor["start_time"] = executor["end_time"] = group["end_time"] = group["start_time"]

    def write(self, step: str, text: str) -> None:
        self.logs[self.pod(step)] += text

    def say_begin(self, step: str, inputs: dict[str, str] | None = None) -> None:
        """Write what a step's code writes first into its log."""
        self.write(step, log_of(StepBegin(step=step, inputs=inputs or {})))

    def end(
        self,
        step: str,
        state: str = "SUCCEEDED",
        inputs: dict[str, str] | None = None,
        **record: Any,
    ) -> None:
        """End a step, with the record that its code writes into its log."""
        status = "done" if state == "SUCCEEDED" else "failed"
        whole = {"status": status, "exit_code": 0 if status == "done" else 1, "seconds": 1.5}
        self.say_begin(step, inputs)
        self.write(step, log_of(StepEnd(step=step, **{**whole, **record})))
        self.stop(step, state)

    def stop(self, step: str, state: str) -> None:
        """End a step without a word."""
        self._close(self._group(step), state)
        self._close(self._executor(step), state)

    def fail_driver(self, step: str) -> None:
        node = self._node(f"{step.replace('_', '-')}-driver", "system-container-driver", "FAILED")
        self._close(node, "FAILED")

    def skip(self, name: str = "condition-2") -> None:
        self._node(f"{name}-driver", "system-dag-driver", "SUCCEEDED")
        self._node(name, "comp-condition-2", "SKIPPED")

    def pod(self, step: str) -> str:
        return str(self._executor(step)["_pod"])

    def task_details(self) -> list[dict[str, Any]]:
        """Return the nodes in the API's words."""
        hidden = {"_pod", "_hash"} | (set() if self.names_pods else {"pod_name"})
        return [
            {key: value for key, value in node.items() if key not in hidden} for node in self.nodes
        ]

    def _node(self, name: str, template: str, state: str) -> dict[str, Any]:
        number = next(self._numbers)
        pod = name if name == WORKFLOW else f"{WORKFLOW}-{template}-{number}"
        began = moment(next(self._seconds))
        node = {
            "run_id": self.run_id,
            "task_id": f"task-{number}",
            "display_name": name,
            "create_time": began,
            "start_time": began,
            "end_time": "1970-01-01T00:00:00Z" if state == "RUNNING" else began,
            "state": state,
            "pod_name": pod,
            "child_tasks": [],
            "_pod": pod,
            "_hash": str(number),
        }
        self.nodes.append(node)
        return node

    def _add_executor(self, name: str, state: str) -> dict[str, Any]:
        pod = self._node("executor", "system-container-impl", state)
        self._group(name)["child_tasks"] = [{"pod_name": f"{WORKFLOW}-{pod['_hash']}"}]
        return pod

    def _group(self, step: str) -> dict[str, Any]:
        name = step.replace("_", "-")
        return next(node for node in self.nodes if node["display_name"] == name)

    def _executor(self, step: str) -> dict[str, Any]:
        end = self._group(step)["child_tasks"][0]["pod_name"].rpartition("-")[2]
        return next(node for node in self.nodes if node["_hash"] == end)

    def _close(self, node: dict[str, Any], state: str) -> None:
        node["state"], node["end_time"] = state, moment(next(self._seconds))


def log_of(event: Event) -> str:
    """Return the line that a step's code writes into its log for an event."""
    written: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("trainer.events")
    level, logger.level = logger.level, logging.INFO
    logger.propagate = False
    logger.addHandler(handler)
    try:
        events.emit(event)
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
        logger.level = level
    json.loads(written[0])
    return f"2026-01-02 03:04:05,006 INFO {written[0]}\n"
