"""The plan of a run that trains as a Kubernetes job on the fake cluster."""

import random
from dataclasses import dataclass

from tests.chaos.plan import Fault, Plan

STEPS, EVERY = 1500, 250
STRATEGIES = (
    "async_parameter_server",
    "sync_parameter_server",
    "in_graph",
    "multi_worker_mirrored",
)
# Weights of the kinds of faults that affect a task.
OF_TASKS = {
    "delete": 4,
    "evict": 3,
    "preempt": 2,
    "kill": 3,
    "kill task": 3,
    "delete by force": 1,
    "evict by node": 1,
}
OF_THE_RUN = {
    "cancel": 2,
    "kill launcher": 2,
    "API outage": 2,
    "controller outage": 2,
    "suspend": 2,
}
LASTING = ("API outage", "controller outage", "suspend")


@dataclass(frozen=True, kw_only=True)
class JobPlan(Plan):
    launcher: str
    steps: int = STEPS
    every: int = EVERY

    def settings(self) -> dict[str, object]:
        return {
            **super().settings(),
            "cluster.launcher": self.launcher,
            "gate.min.accuracy": 0.7,
            # The limit is so long that the exit step, not the guard, ends a job without a launcher.
            "cluster.kubernetes.deadlines.heartbeat": 300,
        }

    @property
    def most_failures(self) -> int:
        """Return how many tries may fail: only a killed launcher makes a try fail."""
        return sum(fault.kind == "kill launcher" for fault in self.faults)


def draw_job_plan(seed: int, launcher: str) -> JobPlan:
    """Return the plan of a seed; its faults are the same for each engine."""
    draw = random.Random(seed)
    shape = JobPlan(
        seed=seed,
        launcher=launcher,
        strategy=draw.choices(STRATEGIES, (4, 2, 1, 2))[0],
        servers=draw.randint(1, 2),
        workers=draw.randint(2, 3),
        evaluator=draw.random() < 0.2,
        faults=(),
    )
    faults = sorted(
        (_fault(draw, shape) for _ in range(draw.randint(1, 4))), key=lambda fault: fault.step
    )
    return JobPlan(**{**vars(shape), "faults": tuple(faults)})


def _fault(draw: random.Random, plan: JobPlan) -> Fault:
    kinds = {**OF_TASKS, **OF_THE_RUN}
    kind = draw.choices(list(kinds), list(kinds.values()))[0]
    return Fault(
        kind=kind,
        task=draw.choice(plan.tasks()) if kind in OF_TASKS else "",
        step=draw.randrange(1, STEPS - EVERY),
        seconds=draw.uniform(1, 12) if kind in LASTING else 0.0,
    )
