"""Tests the invariants of growing tables and the plans of their runs."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.config.load import load_config
from tests.chaos import table_plan
from tests.chaos.grown import in_words
from tests.chaos.invariants import Outcome, rows_of, violations_of
from tests.chaos.plan import OUTAGES
from tests.chaos.table_plan import draw_table_plan
from tests.chaos.test_invariants import attempt, progress


def shard(number, ids, *, given=None, evicted=0, **changed):
    """Return the variables of a shard of 6 slots, whose first slots belong to ids."""
    own, count = f"model/user_embedding/shard_{number}_", len(ids)
    live = np.arange(7) < count
    slot = f"optimizer/adam/user_embedding_shard_{number}_rows_momentum"
    return {
        f"{own}rows": np.where(live[:, None], 0.5, 0.0).repeat(2, axis=1),
        f"{own}ids": np.array([*ids, *[0] * (7 - count)]),
        f"{own}used": np.where(live, 10, -1),
        f"{own}tally": np.array([1, count + evicted if given is None else given, evicted, 0, 0, 0]),
        slot: np.zeros([7, 2]),
        **{f"{own}{name}": value for name, value in changed.items()},
    }


def keep(folder, step, *shards):
    source = folder / f"source-{step}"
    source.mkdir()
    names, tensors = [], []
    for path, value in {name: each for own in shards for name, each in own.items()}.items():
        key = f"variables/{path.replace('.', '..').replace('/', '.S')}/.ATTRIBUTES/VARIABLE_VALUE"
        names, tensors = [*names, key], [*tensors, value]
    tf.raw_ops.SaveV2(
        prefix=f"{source}/variables",
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=tensors,
    )
    uri = storage.uri_of(folder / "checkpoints" / f"step-{step:08d}")
    storage.publish(source, uri, kind="checkpoint", fields={"global_step": step})
    return uri


@pytest.fixture
def grown_run(tmp_path):
    """Return a valid run with a table, and a function that publishes another checkpoint of it."""
    outcome = Outcome(
        checkpoints=storage.uri_of(tmp_path / "checkpoints"),
        steps=300,
        every=100,
        tables=("user",),
        ends=[(0, "")],
        events=[attempt(0), progress(300)],
    )
    keep(tmp_path, 100, shard(0, [3, 5]), shard(1, [4]))
    return outcome, partial(keep, tmp_path)


def test_a_sound_table_violates_none(grown_run):
    outcome, publishes = grown_run
    publishes(200, shard(0, [3, 7], evicted=1), shard(1, [4, 6]))
    publishes(300, shard(0, [7, 5], evicted=2), shard(1, [4, 6]))
    assert violations_of(outcome) == []
    assert in_words(list(rows_of(outcome).values())).startswith(
        "3 checkpoints read, 4 rows in the last, 2 taken back, 0 ids with two rows, 0 miscounted"
    )


@pytest.mark.parametrize(
    ("shards", "total", "words"),
    [
        (
            (shard(0, [3, 5, 5]), shard(1, [4])),
            "torn",
            "step-00000300: shard 0 of user: 1 ids have two rows, and 0 are the most",
        ),
        (
            (shard(0, [3, 5], given=4), shard(1, [4])),
            "torn",
            "step-00000300: shard 0 of user: 2 rows, of 4 given and 0 taken",
        ),
        (
            (shard(0, [3, 5], rows=np.zeros([7, 2])), shard(1, [4])),
            "torn",
            "step-00000300: shard 0 of user: 2 rows are of zeros",
        ),
        (
            (shard(0, [3, 5], rows=np.full([7, 2], np.nan)), shard(1, [4])),
            "torn",
            "step-00000300: shard 0 of user: model/user_embedding/shard_0_rows is not finite, or",
        ),
        (
            (shard(0, [3, 5], rows=np.ones([9, 2])), shard(1, [4])),
            "torn",
            "step-00000300: shard 0 of user: model/user_embedding/shard_0_ids is not finite, or of",
        ),
        (
            (shard(0, [3, 5]), shard(1, [4, 5])),
            "torn",
            "step-00000300: 1 ids of user are in two shards",
        ),
        (
            (shard(0, [3, 9], given=2), shard(1, [4])),
            "lost",
            "step-00000100 to step-00000300: shard 0 of user: 1 ids are gone, and 0 rows were",
        ),
        (
            (shard(0, [5, 3], given=1), shard(1, [4])),
            "lost",
            "step-00000100 to step-00000300: shard 0 of user: 1 rows were given, and 2 before",
        ),
        (
            (shard(0, [3, 5]),),
            "lost",
            "step-00000100 to step-00000300: it has other shards",
        ),
    ],
)
def test_a_violation_of_rows_is_described(grown_run, shards, total, words):
    outcome, publishes = grown_run
    publishes(300, *shards)
    found = violations_of(outcome)
    assert (total, words) in [(each.total, each.words[: len(words)]) for each in found]


def test_a_row_without_slots_is_described(grown_run):
    outcome, publishes = grown_run
    bare = {path: value for path, value in shard(0, [3, 5]).items() if "optimizer" not in path}
    publishes(300, bare, shard(1, [4]))
    (violation,) = violations_of(outcome)
    assert violation.words == (
        "step-00000300: shard 0 of user: the optimizer has no slots of its rows"
    )


def test_a_step_that_ended_halfway_may_leave_rows(grown_run):
    outcome, publishes = grown_run
    publishes(300, shard(0, [3, 5, 5]), shard(1, [4], given=2))
    assert len(violations_of(outcome)) == 2
    outcome.halfway, outcome.losses = 1, 1
    assert len(violations_of(outcome)) == 2
    outcome.events.append(attempt(300))
    assert violations_of(outcome) == []


def test_a_seed_is_a_plan_of_tables():
    plans = [draw_table_plan(seed) for seed in range(200)]
    assert plans == [draw_table_plan(seed) for seed in range(200)]
    assert {plan.strategy for plan in plans} == set(table_plan.STRATEGIES)
    assert {plan.servers for plan in plans} == {1, 2, 3}
    for name in ("by_parts", "little_room", "in_bucket"):
        assert {bool(getattr(plan, name)) for plan in plans} == {True, False}
    faults = [(plan, fault) for plan in plans for fault in plan.faults]
    kinds = {kind for kind, _ in table_plan.TURNS} - {"outage"}
    assert {fault.kind for _, fault in faults} == {*kinds, *table_plan.FURTHER, *OUTAGES}
    for plan, fault in faults:
        assert set(fault.tasks()) <= set(plan.tasks())
        assert (len(set(fault.tasks())) == 2) == (fault.kind == "kill pair")
        assert 0 < fault.step < plan.steps
        assert (fault.kind in OUTAGES) <= plan.has_outages


@pytest.mark.parametrize("first", [0, 7, 1234])
def test_twenty_seeds_have_each_kind_of_fault_of_tables_twice(first):
    plans = [draw_table_plan(seed) for seed in range(first, first + 20)]
    kinds = {kind for kind, _ in table_plan.TURNS} - {"outage"}
    for kind in kinds:
        assert sum(kind in {fault.kind for fault in plan.faults} for plan in plans) >= 2
    assert all(
        any(fault.kind == kind for each in plans for fault in each.faults) for kind in OUTAGES
    )


def test_a_plan_of_tables_is_a_configuration():
    for seed in range(40):
        plan = draw_table_plan(seed)
        assignments = [f"{name}={value}" for name, value in plan.settings().items()]
        config = load_config(plan.config, assignments)
        assert config.training.steps == plan.steps
        tables = config.model.args.get("tables", {})
        assert sorted(tables) == sorted(plan.tables)
