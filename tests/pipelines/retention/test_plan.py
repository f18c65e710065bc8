"""Tests removal plans against an oracle that follows the history instead of references."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.pipelines.retention import (
    CHECKPOINT,
    RUN,
    VERSION,
    Inventory,
    Item,
    Model,
    Policy,
    Promotion,
    make_plan,
    policy,
)
from flotilla.trainer.runtime.errors import ConfigError

NOW = datetime(2026, 11, 23, tzinfo=UTC)


@dataclass
class Trained:
    """A run of the history; the oracle knows its inputs, the planner only its records."""

    day: int
    dataset: str
    code: str
    warm: int = 0
    busy: bool = False
    version: int = 0
    reference: int = 0
    against: int = 0


@dataclass
class History:
    runs: list[Trained] = field(default_factory=list)
    promotions: list[Promotion] = field(default_factory=list)
    made: dict[int, Trained] = field(default_factory=dict)

    @property
    def champion(self) -> int:
        return self.promotions[-1].version if self.promotions else 0

    def promote(self, version: int, restores: int = 0) -> None:
        number = len(self.promotions) + 1
        self.promotions.append(Promotion(number=number, version=version, restores=restores))

    def train(self, *drawn) -> None:
        """Train a model and, like the gate, keep the reference until an improvement is proved."""
        day, dataset, code, warm, busy, outcome = drawn
        run = Trained(day=day, dataset=f"datasets/{dataset}", code=f"code/{code}", busy=busy)
        run.warm = self.champion if warm else 0
        run.against = self.champion
        self.runs.append(run)
        if outcome == "refused" or busy:
            return
        run.version = len(self.made) + 1
        if self.champion and outcome == "equal":
            run.reference = self.made[self.champion].reference or self.champion
        self.made[run.version] = run
        if outcome != "registered":
            self.promote(run.version)

    def roll_back(self) -> None:
        target = self.before()
        if target:
            self.promote(target.version, target.restores or target.number)

    def before(self) -> Promotion | None:
        if not self.promotions:
            return None
        newest = self.promotions[-1]
        earlier = [e for e in self.promotions if e.number < (newest.restores or newest.number)]
        return earlier[-1] if earlier else None


def name(history, run):
    return f"m-{history.runs.index(run):04d}"


def place(number):
    return f"registry/models/m/versions/{number:06d}"


def checkpoint(history, run):
    return f"{name(history, run)}/checkpoints/step-00000100"


def inventory(history) -> Inventory:
    items = []
    latest = {}
    for run in history.runs:
        at, last = name(history, run), NOW - timedelta(days=run.day)
        for path in (run.dataset, run.code):
            latest[path] = max(latest.get(path, last), last)
        warm = {checkpoint(history, history.made[run.warm])} if run.warm else set()
        against = {place(run.against)} if run.against else set()
        own, evaluation, decision = (
            f"{at}/{each}" for each in ("checkpoints/step-00000100", "evaluation/e", "decision/d")
        )
        refs = {own: warm, evaluation: {own, run.dataset} | against}
        refs |= {decision: {evaluation} | against, f"{at}/checkpoints/step-00000000": warm}
        for path, each in refs.items():
            kind = CHECKPOINT if "checkpoints" in path else path.split("/")[1]
            items.append(Item(path=path, kind=kind, bytes=1, last=last, refs=frozenset(each)))
        every = frozenset().union(*refs.values(), {run.code, run.dataset})
        items.append(Item(path=at, kind=RUN, bytes=9, last=last, refs=every, busy=run.busy))
        if run.version:
            named = frozenset({own, run.dataset, run.code, decision, evaluation, *warm})
            items.append(Item(path=place(run.version), kind=VERSION, last=last, refs=named))
    shared = {"datasets": "dataset", "code": "code"}
    for path, last in latest.items():
        items.append(Item(path=path, kind=shared[path.split("/")[0]], bytes=5, last=last))
    model = Model(
        name="m",
        versions={number: place(number) for number in history.made},
        promotions=tuple(history.promotions),
        references={n: run.reference for n, run in history.made.items() if run.reference},
    )
    return Inventory(items={each.path: each for each in items}, models=(model,))


def chain(history, number) -> set[str]:
    """Return the paths that a version needs, as the oracle knows them."""
    run = history.made[number]
    at = name(history, run)
    found = {place(number), at, run.dataset, run.code, checkpoint(history, run)}
    found |= {f"{at}/evaluation/e", f"{at}/decision/d"}
    if run.warm:
        source = history.made[run.warm]
        found |= {checkpoint(history, source), name(history, source)}
    return found


def needed(history, wanted) -> set[str]:
    """Return all paths that the oracle keeps under a policy."""
    kept = set(history.made) if wanted.versions is None else set()
    kept |= set(sorted(history.made)[-(wanted.versions or 1) :])
    if history.champion:
        kept.add(history.champion)
        before = history.before()
        kept |= {before.version} if before else set()
    kept |= {run.against for run in history.runs if run.busy and run.against}
    kept |= {history.made[each].reference for each in kept if history.made[each].reference}
    found = set().union(*(chain(history, each) for each in kept)) if kept else set()
    for run in history.runs:
        is_young = wanted.runs is None or timedelta(days=run.day) <= wanted.runs
        if run.busy or is_young:
            at = name(history, run)
            found |= {at, run.dataset, run.code, checkpoint(history, run), f"{at}/evaluation/e"}
            found |= {checkpoint(history, history.made[run.warm])} if run.warm else set()
    return found


a_run = st.tuples(
    st.integers(0, 99),
    st.sampled_from("abcd"),
    st.sampled_from("xyz"),
    st.booleans(),
    st.sampled_from((False, False, False, True)),
    st.sampled_from(("refused", "registered", "equal", "gained", "equal")),
)
steps = st.lists(st.one_of(a_run, a_run, a_run, st.just("rollback"), st.integers(1, 30)))
policies = st.builds(
    Policy,
    runs=st.none() | st.integers(1, 100).map(lambda days: timedelta(days=days)),
    versions=st.none() | st.integers(1, 12),
)


def lived(happened) -> History:
    history = History()
    for each in happened:
        if each == "rollback":
            history.roll_back()
        elif isinstance(each, int):
            if each in history.made:
                history.promote(each)
        else:
            history.train(*each)
    return history


@settings(max_examples=150, deadline=None)
@given(steps, policies)
def test_nothing_that_the_champion_needs_ever_goes(happened, wanted):
    history = lived(happened)
    found = inventory(history)
    plan = make_plan(found, wanted, NOW)
    going = {each.path for each in plan.going}
    stays = needed(history, wanted)
    assert not going & stays
    # Removing a run removes everything below it.
    assert not any(path.startswith(f"{run}/") for path in stays for run in going)
    after = Inventory(
        items={
            path: item
            for path, item in found.items.items()
            if path not in going and path.split("/")[0] not in going
        },
        models=found.models,
    )
    again = make_plan(after, wanted, NOW)
    assert not {each.path for each in again.going}
    # Old versions are removed; beyond the limit, only versions for a rollback are kept.
    if wanted.versions:
        left = len(history.made) - sum(each.kind == VERSION for each in plan.going)
        busy = sum(run.busy for run in history.runs)
        assert left <= wanted.versions + 2 * (3 + busy)


def test_what_is_old_and_not_needed_goes_in_the_order_of_references():
    nights = [
        (90, "a", "x", False, False, "gained"),
        (80, "b", "x", True, False, "equal"),
        (70, "c", "y", False, False, "refused"),
        (1, "d", "z", True, False, "equal"),
    ]
    history = lived(nights)
    plan = make_plan(inventory(history), policy("30d", 1), NOW)
    assert [(each.kind, each.path) for each in plan.going] == [
        ("run", "m-0002"),
        ("checkpoint", "m-0000/checkpoints/step-00000000"),
        ("checkpoint", "m-0001/checkpoints/step-00000000"),
        ("dataset", "datasets/c"),
        ("code", "code/y"),
    ]
    assert plan.bytes == 9 + 1 + 1 + 5 + 5


def test_versions_alone_go_where_no_time_is_given():
    happened = [(each, "a", "x", False, False, "gained") for each in range(90, 80, -1)]
    plan = make_plan(inventory(lived(happened)), policy("", 3), NOW)
    assert [each.path for each in plan.going] == [place(number) for number in range(1, 8)]


def test_a_promotion_that_is_decided_keeps_its_version():
    history = lived([(90, "a", "x", False, False, "gained")] * 6)
    found = inventory(history)
    model = Model(**{**vars(found.models[0]), "claimed": frozenset({2})})
    going = make_plan(Inventory(items=found.items, models=(model,)), policy("", 1), NOW).going
    assert [each.path for each in going] == [place(number) for number in (1, 3, 4)]


def test_records_that_cannot_be_read_hold_back_what_they_may_need():
    found = inventory(lived([(90, "a", "x", False, False, "gained")] * 4))
    path = place(1)
    damaged = Item(path=path, kind=VERSION, damaged=f"{path} is damaged")
    plan = make_plan(
        Inventory(items={**found.items, path: damaged}, models=found.models), policy("2d", 1), NOW
    )
    assert {each.kind for each in plan.going} == {"version"}
    assert path not in {each.path for each in plan.going}
    assert plan.remarks[0] == f"kept: {path} is damaged"
    assert "no run, dataset or checkpoint is removed" in plan.remarks[1]
    model = Model(**{**vars(found.models[0]), "damaged": ("promotion 3",)})
    assert not make_plan(Inventory(items=found.items, models=(model,)), policy("2d", 1), NOW).going


def test_what_cannot_be_dated_stays():
    run = Item(path="r", kind=RUN)
    plan = make_plan(Inventory(items={"r": run}), policy("1d", None), NOW)
    assert not plan.going
    assert plan.remarks == ("kept r, because the time of the run is unknown",)


@pytest.mark.parametrize("text", ["30", "-1d", "d", "1.5d", "0d", "23h", "3m", "٣d", " "])
def test_a_wrong_time_and_no_version_at_all_are_refused(text):
    with pytest.raises(ConfigError, match="--keep-runs"):
        policy(text, None)
    with pytest.raises(ConfigError, match="at least 1 version"):
        policy("", 0)


@pytest.mark.parametrize(("text", "days"), [("24h", 1), ("30d", 30), ("2w", 14), ("99999999w", 0)])
def test_a_time_is_understood(text, days):
    assert policy(text, 3) == Policy(runs=timedelta(days=days or 36500), versions=3)
