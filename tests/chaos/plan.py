"""Draws the plan of a run from a seed, so that the run can be repeated."""

import random
from dataclasses import dataclass, replace

STEPS = 3000
EVERY = 250
STALL_SECONDS = 15
CLUSTERED = ("async_parameter_server", "sync_parameter_server", "in_graph")
STRATEGIES = (*CLUSTERED, "multi_worker_mirrored", "single")
# Weights by which faults are drawn. One fault of each run is not drawn: the kinds in KINDS are
# taken in turn, each for one round of strategies.
OF_TASKS = {"kill pair": 2, "kill": 3, "stop": 2, "pause": 2}
OUTAGES = {"outage of 15 s": 15.0, "outage of 2 min": 120.0}
OF_THE_RUN = {
    "kill launcher": 1,
    "lie": 1,
    "torn file": 2,
    "full disk": 1,
    **dict.fromkeys(OUTAGES, 0),
}
KINDS = (
    "kill pair", "kill launcher", "lie", "outage of 15 s", "torn file",
    "kill", "stop", "full disk", "pause", "outage of 2 min",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of a run, injected at a global step.

    If `silent`, an outage accepts connections but relays no data.
    """

    kind: str
    task: str
    step: int
    seconds: float = 0.0
    other: str = ""
    silent: bool = False

    def __str__(self) -> str:
        tasks = " and ".join(self.tasks())
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        manner = ", silent" if self.silent else ""
        return f"{self.kind}{f' {tasks}' if tasks else ''}{lasts}{manner} at step {self.step}"

    def tasks(self) -> list[str]:
        return [task for task in (self.task, self.other) if task]


@dataclass(frozen=True, kw_only=True)
class Plan:
    seed: int
    strategy: str
    servers: int
    workers: int
    evaluator: bool
    faults: tuple[Fault, ...]
    steps: int = STEPS
    every: int = EVERY

    def __str__(self) -> str:
        shape = f"{self.servers} ps, {self.workers} workers" if self.strategy != "single" else ""
        if self.strategy == "multi_worker_mirrored":
            shape = f"{self.workers} workers"
        parts = [self.strategy, shape, "evaluator" if self.evaluator else ""]
        return ", ".join(part for part in parts if part)

    def tasks(self) -> list[str]:
        counts = {"ps": 0, "worker": 0, "chief": 0, "evaluator": int(self.evaluator)}
        if self.strategy in CLUSTERED:
            counts |= {"ps": self.servers, "worker": self.workers, "chief": 1}
        elif self.strategy == "single":
            counts["chief"] = 1
        else:
            counts["worker"] = self.workers
        return [f"{role}-{index}" for role, count in counts.items() for index in range(count)]

    @property
    def has_outages(self) -> bool:
        return any(fault.kind in OUTAGES for fault in self.faults)

    @property
    def by_parts(self) -> bool:
        """Return whether servers write checkpoint parts; the models here are too small for that."""
        return False

    @property
    def tables(self) -> tuple[str, ...]:
        return ()

    @property
    def halfway(self) -> int:
        """Return the maximum number of ids that a loss may leave inconsistent."""
        return 0

    @property
    def command(self) -> tuple[str, ...]:
        """Return the command and the configuration file, which is omitted for the digits."""
        return ("run",)

    @property
    def exits_early(self) -> bool:
        return any(fault.kind == "lie" for fault in self.faults)

    def settings(self) -> dict[str, object]:
        return {
            "training.strategy": self.strategy,
            "training.steps": self.steps,
            "training.checkpoint_every": self.every,
            "training.validate_every": 0,
            "training.stall_timeout": STALL_SECONDS,
            "cluster.parameter_servers": self.servers,
            "cluster.workers": self.workers,
            "cluster.evaluator": str(self.evaluator).lower(),
            "cluster.communication": "ring",
            # Each fault may cost a restart, and these tests do not test the restart limit.
            "cluster.max_restarts": 2 * len(self.faults) + 2,
            "gate.min.accuracy": 0.8,
        }


def draw_plan(seed: int) -> Plan:
    """Return the plan of a seed.

    50 consecutive seeds include each kind of fault under each strategy.
    """
    draw = random.Random(seed)
    turn, number = divmod(seed, len(STRATEGIES))
    shape = Plan(
        seed=seed,
        strategy=STRATEGIES[number],
        servers=draw.randint(1, 2),
        workers=draw.randint(2, 3),
        evaluator=draw.random() < 0.25,
        faults=(),
    )
    weights = {**OF_TASKS, **OF_THE_RUN}
    further = draw.choices(list(weights), list(weights.values()), k=draw.randint(0, 2))
    kinds = [KINDS[turn % len(KINDS)], *further]
    faults = sorted((_fault(draw, shape, kind) for kind in kinds), key=lambda fault: fault.step)
    return replace(shape, faults=tuple(faults))


def _fault(draw: random.Random, plan: Plan, kind: str) -> Fault:
    tasks = _tasks(draw, plan, kind) if kind in OF_TASKS else []
    if kind == "kill pair" and len(tasks) == 1:
        kind = "kill"
    return Fault(
        kind=kind,
        task=tasks[0] if tasks else "",
        step=draw.randrange(1, STEPS - EVERY),
        seconds=draw.uniform(0.2, 5) if kind == "pause" else OUTAGES.get(kind, 0.0),
        other=tasks[1] if kind == "kill pair" else "",
        silent=kind in OUTAGES and draw.random() < 0.5,
    )


def _tasks(draw: random.Random, plan: Plan, kind: str) -> list[str]:
    """Draw one or two tasks; two tasks have different roles if the strategy has several."""
    tasks = plan.tasks()
    one = draw.choice(tasks)
    if kind != "kill pair":
        return [one]
    others = [task for task in tasks if _role(task) != _role(one)]
    others = others or [task for task in tasks if task != one]
    return [one, draw.choice(others)] if others else [one]


def _role(task: str) -> str:
    return task.partition("-")[0]
