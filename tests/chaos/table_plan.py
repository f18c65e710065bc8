"""The plan of a run that trains growing tables, some with too few rows for all ids."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.chaos.plan import OUTAGES, Fault, Plan

STEPS, EVERY, BATCH = 1200, 120, 64
STRATEGIES = {"async_parameter_server": 14, "sync_parameter_server": 3, "in_graph": 3}
SERVERS = {2: 7, 1: 2, 3: 2}
ROLES = {"ps": 4, "chief": 2, "worker": 3, "evaluator": 1}
# One fault of each run is chosen in turn, so that 20 consecutive runs have each of these twice. A
# fault without a role affects the whole run, its leader, or random tasks.
TURNS = (
    ("kill", "ps"), ("kill", "chief"), ("torn file", ""), ("kill pair", ""), ("outage", ""),
    ("stop", "ps"), ("full disk", "ps"), ("kill", "worker"), ("kill launcher", ""),
    ("kill pair", "ps"),
)  # fmt: skip
# Weights of the kinds of further faults.
FURTHER = {"kill": 6, "kill pair": 2, "stop": 2, "pause": 2, "torn file": 2, "full disk": 1}
OF_TASKS = ("kill", "stop", "pause")
EXAMPLE = Path(__file__).parents[2] / "examples" / "clicks_large"
# With these settings, the events contain about 2,200 users and nearly all items, and new users
# appear during most of a run.
CLICKS = {
    "users": 6000, "items": 12_000, "new_users": 100, "new_items": 20, "segments": 64,
    "categories": 64, "zipf": 0.2, "events": 60_000, "test_events": 4000,
}  # fmt: skip
# Slots per shard for users and items: ROOM is enough for all ids; with LITTLE_ROOM, rows are
# reassigned.
ROOM, LITTLE_ROOM = (2048, 8192), (600, 2400)
TABLES = ("user", "item", "segment", "category")


@dataclass(frozen=True, kw_only=True)
class TablePlan(Plan):
    """A run with tables, and its faults.

    Attributes:
        parts_mb: size in MB above which servers write their parts.
        little_room: whether the tables are so small that rows are reassigned.
        min_count: the number of times that an id must occur before it gets a row.
        is_whole: whether the whole pipeline runs; in most plans, only training runs.
    """

    steps: int = STEPS
    every: int = EVERY
    parts_mb: int = 0
    little_room: bool = False
    min_count: int = 1
    keep: int = 3
    in_bucket: bool = False
    is_whole: bool = False

    def __str__(self) -> str:
        parts = {
            super().__str__(): True,
            "by parts": self.by_parts,
            "little room": self.little_room,
            f"min_count {self.min_count}": self.min_count > 1,
            f"keep {self.keep}": True,
            "bucket": self.has_outages,
            "whole pipeline": self.is_whole,
        }
        return ", ".join(part for part, is_so in parts.items() if is_so)

    @property
    def has_outages(self) -> bool:
        return self.in_bucket or super().has_outages

    @property
    def by_parts(self) -> bool:
        return self.parts_mb == 0

    @property
    def tables(self) -> tuple[str, ...]:
        return TABLES

    @property
    def config(self) -> Path:
        return EXAMPLE / "clicks_large.yaml"

    @property
    def command(self) -> tuple[str, ...]:
        return ("run" if self.is_whole else "train", str(self.config), "--code", str(EXAMPLE))

    @property
    def halfway(self) -> int:
        return BATCH * self.workers

    def settings(self) -> dict[str, object]:
        of_all = super().settings()
        del of_all["gate.min.accuracy"]
        return {
            **of_all,
            "training.batch_size": BATCH,
            "training.keep": self.keep,
            "training.checkpoint_parts_mb": self.parts_mb,
            "model.args.shards": max(2, self.servers),
            **self._growing(),
        }

    def _growing(self) -> dict[str, object]:
        shards = max(2, self.servers)
        users, items = LITTLE_ROOM if self.little_room else ROOM
        tables: dict[str, Any] = {
            "user": {"capacity": shards * users, "min_count": self.min_count},
            "item": {"capacity": shards * items, "min_count": self.min_count},
            "segment": {"capacity": shards * 128},
            "category": {"capacity": shards * 128},
        }
        return {
            "data.builder_args": json.dumps(CLICKS),
            "data.validation": 0.02 if self.evaluator else 0,
            "model.args.tables": json.dumps(tables),
            "training.warm_start": "''",
            "gate.min": json.dumps({"query_auc": 0.4}),
            # These runs only test survival, so their models may be no better than a constant.
            "gate.constant": "reported",
            "export.formats": json.dumps(["saved_model"]),
        }


def draw_table_plan(seed: int) -> TablePlan:
    """Return the plan of a seed; 20 consecutive seeds include each kind of fault twice."""
    draw = random.Random(seed)
    strategy = _one_of(draw, STRATEGIES)
    by_parts = draw.random() < 0.8
    shape = TablePlan(
        seed=seed,
        strategy=strategy,
        servers=_one_of(draw, SERVERS),
        workers=draw.randint(2, 3),
        evaluator=draw.random() < 0.15,
        faults=(),
        parts_mb=0 if by_parts else 64,
        little_room=draw.random() < 0.4,
        min_count=draw.randint(1, 2),
        keep=draw.choice((3, 100, 100)),
        in_bucket=draw.random() < 0.25,
    )
    turn, number = divmod(seed, len(TURNS))
    kind, role = TURNS[number]
    if kind == "outage":
        kind = list(OUTAGES)[turn % len(OUTAGES)]
    further = draw.choices(list(FURTHER), list(FURTHER.values()), k=draw.randint(0, 2))
    kinds = [(kind, role), *((each, "") for each in further)]
    faults = sorted((_fault(draw, shape, *each) for each in kinds), key=lambda fault: fault.step)
    return replace(shape, faults=tuple(faults), is_whole=draw.random() < 0.1)


def _fault(draw: random.Random, plan: TablePlan, kind: str, role: str) -> Fault:
    tasks = _tasks(draw, plan, kind, role)
    if kind == "kill pair" and len(tasks) == 1:
        kind = "kill"
    return Fault(
        kind=kind,
        task=tasks[0] if tasks else "",
        step=draw.randrange(1, plan.steps - plan.every),
        seconds=draw.uniform(0.2, 5) if kind == "pause" else OUTAGES.get(kind, 0.0),
        other=tasks[1] if len(tasks) > 1 else "",
        silent=kind in OUTAGES and draw.random() < 0.5,
    )


def _tasks(draw: random.Random, plan: TablePlan, kind: str, role: str) -> Sequence[str]:
    """Draw the tasks that a fault affects: of the given role, or of a random one."""
    if kind == "kill pair":
        among = _of_role(plan, role) if role else plan.tasks()
        return draw.sample(among, min(2, len(among)))
    if kind in OF_TASKS or (kind == "full disk" and role):
        there = {name: weight for name, weight in ROLES.items() if _of_role(plan, name)}
        return [draw.choice(_of_role(plan, role or _one_of(draw, there)))]
    return []


def _of_role(plan: TablePlan, role: str) -> list[str]:
    return [task for task in plan.tasks() if task.startswith(f"{role}-")]


def _one_of(draw: random.Random, weights: Mapping[Any, int]) -> Any:
    return draw.choices(list(weights), list(weights.values()))[0]
