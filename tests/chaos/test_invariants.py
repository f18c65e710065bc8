"""Each invariant detects its violation; a seed always gives the same plan."""

import socket
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.config.load import load_config
from flotilla.trainer.events import (
    AttemptBegin,
    CheckpointPassedOver,
    CheckpointPublished,
    Progress,
    Saved,
    ServersLost,
)
from tests.chaos import job_plan, table_plan
from tests.chaos.faults import FAULTS
from tests.chaos.grown import in_words
from tests.chaos.invariants import (
    INVARIANTS,
    KILLED,
    TOTALS,
    Outcome,
    Tally,
    repeated,
    rows_of,
    violations_of,
)
from tests.chaos.job_plan import draw_job_plan
from tests.chaos.job_run import OF_THE_RUN
from tests.chaos.plan import KINDS, OUTAGES, STEPS, STRATEGIES, draw_plan
from tests.chaos.stores import LOOPBACK, Door, store_below
from tests.chaos.table_plan import draw_table_plan


def publish(folder, step):
    source = folder / f"source-{step}"
    source.mkdir()
    (source / "data").write_bytes(b"0123456789")
    uri = storage.uri_of(folder / "checkpoints" / f"step-{step:08d}")
    storage.publish(source, uri, kind="checkpoint", fields={"global_step": step})
    return storage.local_path(uri)


@pytest.fixture
def sound(tmp_path):
    publish(tmp_path, 3000)
    return Outcome(
        checkpoints=storage.uri_of(tmp_path / "checkpoints"),
        steps=3000,
        every=250,
        ends=[(1, "failed | after fixing the error, resume with: flotilla run"), (0, "")],
        events=[attempt(0), progress(700), attempt(500), progress(3000)],
        losses=1,
    )


def published(step):
    return CheckpointPublished(uri=f"file:///run/step-{step:08d}", global_step=step)


def passed_over(step):
    return CheckpointPassedOver(uri=f"file:///run/step-{step:08d}", reason="damaged")


def lost(step, back_to, *, recovery="partial"):
    return ServersLost(servers=("ps-1",), recovery=recovery, global_step=step, back_to=back_to)


def attempt(step):
    return AttemptBegin(global_step=step, steps=3000, resumed=step > 0)


def progress(step, rows=0, evicted=0):
    tables = {"tables": {"user": {"rows": rows, "evicted": evicted}}} if rows else {}
    return Progress(
        global_step=step,
        steps=3000,
        loss=1.0,
        steps_per_second=1.0,
        seconds_left=0.0,
        metrics=tables,
    )


def test_a_sound_run_violates_none(sound):
    assert violations_of(sound) == []
    assert repeated(sound) == 200


@pytest.mark.parametrize(
    ("change", "total", "words"),
    [
        ({"ends": [(1, "x")]}, "lost", "it did not end blessed: exit code 1"),
        (
            {"ends": [(1, "no more"), (0, "")]},
            "unclear",
            "a try ended with exit code 1 and no way to resume",
        ),
        (
            {"ends": [(130, "resume with: flotilla run"), (0, "")]},
            "unclear",
            "a try ended with exit code 130",
        ),
        ({"ends": [(KILLED, ""), (0, "")]}, "unclear", "a try ended with exit code -9"),
        (
            {"most_failures": 0},
            "lost",
            "1 tries failed, and 0 may: failed | after fixing the error",
        ),
        ({"tracebacks": 2}, "unclear", "2 tracebacks were shown"),
        (
            {"steps": 3001},
            "wrongly green",
            "the last checkpoint is of step 3000, and 3001 were asked for",
        ),
        (
            {"steps": 2999},
            "inexact",
            "the last checkpoint is of step 3000, and 2999 were asked for",
        ),
        ({"losses": 0}, "lost", "200 steps were repeated, and 0 are the most"),
        (
            {"left": ["python -m flotilla.trainer"]},
            "left",
            "a process is left: python -m flotilla.trainer",
        ),
    ],
)
def test_a_violation_is_described(sound, change, total, words):
    for name, value in change.items():
        setattr(sound, name, value)
    (violation,) = violations_of(sound)
    assert violation.total == total
    assert violation.words.startswith(words)


def test_an_outage_repeats_the_steps_of_checkpoints_that_were_not_published(sound):
    saved = [Saved(uri="", global_step=step, seconds=0.0) for step in (250, 500, 750, 1000)]
    sound.events = [
        *(attempt(0), saved[0], published(250), saved[1], published(500)),
        *(*saved[2:], progress(1100), attempt(500), progress(3000)),
    ]
    (violation,) = violations_of(sound)
    assert violation.words == "600 steps were repeated, and 250 are the most"
    sound.struck = ["outage of 2 min"]
    assert violations_of(sound) == []
    sound.losses = 0
    (violation,) = violations_of(sound)
    assert violation.words == "600 steps were repeated, and 500 are the most"


def test_a_command_line_that_was_killed_says_nothing(sound):
    sound.ends = [(KILLED, ""), (0, "")]
    sound.kills = 1
    assert violations_of(sound) == []


def test_a_try_that_was_cancelled_is_resumed(sound):
    sound.ends = [(130, "interrupted | resume with: flotilla run"), (0, "")]
    sound.cancels = 1
    assert violations_of(sound) == []


def test_a_torn_checkpoint_is_found_unless_a_fault_has_torn_it(sound, tmp_path):
    path = publish(tmp_path, 2750)
    (path / "data").write_bytes(b"0123456780")
    (violation,) = violations_of(sound)
    assert violation.total == "torn"
    assert violation.words.startswith(f"a checkpoint is torn: {storage.uri_of(path)} is damaged")
    sound.torn.add(storage.uri_of(path))
    assert violations_of(sound) == []


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (
            [published(0), published(500), attempt(250)],
            "an attempt began at step 250, and 500 was published",
        ),
        ([published(250), published(500), passed_over(500), attempt(250)], ""),
        ([published(250), attempt(260)], ""),
        (
            [published(250), published(500), lost(700, 250)],
            "values went back to step 250, and 500 is the bound",
        ),
        ([published(250), published(500), passed_over(500), lost(700, 250)], ""),
        ([published(500), lost(700, 500), attempt(700), lost(740, 500), attempt(740)], ""),
        (
            [published(500), lost(700, 500), attempt(700), published(750), lost(760, 500)],
            "values went back to step 500, and 750 is the bound",
        ),
        ([published(500), lost(700, 400, recovery="full")], ""),
    ],
)
def test_values_and_steps_go_back_to_what_is_published(sound, events, words):
    # With `by_parts`, the number of repeated steps is not checked.
    sound.events, sound.by_parts = [attempt(0), *events], True
    assert [each.words for each in violations_of(sound)] == ([words] if words else [])


@pytest.mark.parametrize(
    ("events", "count"),
    [
        ([progress(500, rows=40), progress(600, rows=39)], 40),
        ([progress(500, rows=40), progress(600, rows=38, evicted=2)], 0),
        ([progress(500, rows=40), progress(600, rows=50), attempt(500), progress(520, rows=41)], 0),
        (
            [progress(500, rows=40), progress(600, rows=50), attempt(500), progress(520, rows=39)],
            40,
        ),
        # The attempt resumes at 600, with the values of ps-1 from step 500.
        (
            [
                progress(500, rows=40),
                progress(600, rows=50),
                published(500),
                lost(600, 500),
                attempt(600),
                progress(620, rows=45),
            ],
            0,
        ),
        (
            [
                progress(500, rows=40),
                progress(600, rows=50),
                published(500),
                lost(600, 500),
                attempt(600),
                progress(620, rows=39),
            ],
            40,
        ),
        # After a full recovery, all values are those of the checkpoint at which the attempt begins.
        (
            [
                progress(500, rows=40),
                lost(600, 400, recovery="full"),
                attempt(500),
                progress(520, rows=39),
            ],
            40,
        ),
    ],
)
def test_a_table_has_the_rows_that_it_had_given_out(sound, events, count):
    sound.events, sound.by_parts = [attempt(0), *events], True
    found = [each.words for each in violations_of(sound)]
    at = events[-1].global_step
    words = f"user had {events[-1].metrics['tables']['user']['rows']} rows at step {at}"
    assert found == ([f"{words}, and {count} before"] if count else [])


def test_every_invariant_is_documented():
    assert all(check.__doc__ for check, _ in INVARIANTS)


def test_a_tally_has_a_row_a_strategy_and_a_row_a_kind(sound):
    sound.struck = ["kill", "kill", "torn file"]
    tally = Tally()
    plan = draw_plan(0)
    tally.add(plan, sound, [])
    rows = [line.split("  ")[0] for line in tally.table().splitlines()]
    assert rows == ["", plan.strategy, "kill", "torn file"]
    assert not tally.is_violated
    sound.steps = 3001
    tally.add(plan, sound, violations_of(sound))
    assert tally.is_violated
    assert str(tally).startswith("2 runs, 2 blessed, 1 exact steps, 2 tries resumed, ")
    assert str(tally).endswith(", 1 wrongly green, 0 inexact, 0 left")
    assert all(f" {total}" in str(tally) for total in TOTALS)


def test_a_seed_is_a_plan_of_a_job():
    plans = [draw_job_plan(seed, "jobset") for seed in range(200)]
    assert plans == [draw_job_plan(seed, "jobset") for seed in range(200)]
    assert {plan.strategy for plan in plans} == set(job_plan.STRATEGIES)
    faults = [(plan, fault) for plan in plans for fault in plan.faults]
    assert {fault.kind for _, fault in faults} == {*job_plan.OF_TASKS, *job_plan.OF_THE_RUN}
    for plan, fault in faults:
        assert (fault.task in plan.tasks()) == (fault.kind in job_plan.OF_TASKS)
        assert 0 < fault.step < plan.steps
        assert (fault.seconds > 0) == (fault.kind in job_plan.LASTING)
    assert set(OF_THE_RUN) == set(job_plan.OF_THE_RUN)


def test_a_seed_is_a_plan():
    plans = [draw_plan(seed) for seed in range(200)]
    assert plans == [draw_plan(seed) for seed in range(200)]
    faults = [(plan, fault) for plan in plans for fault in plan.faults]
    assert {fault.kind for _, fault in faults} == set(KINDS) == set(FAULTS)
    assert {fault.task.partition("-")[0] for _, fault in faults} == {
        "", "chief", "ps", "worker", "evaluator",
    }  # fmt: skip
    for plan, fault in faults:
        assert set(fault.tasks()) <= set(plan.tasks())
        assert (len(set(fault.tasks())) == 2) == (fault.kind == "kill pair")
        assert 0 < fault.step < STEPS
        assert (fault.kind in OUTAGES) <= plan.has_outages
    assert {(fault.seconds, fault.silent) for _, fault in faults if fault.kind in OUTAGES} == {
        (seconds, silent) for seconds in OUTAGES.values() for silent in (True, False)
    }


@pytest.mark.parametrize("first", [0, 7, 1234])
def test_fifty_seeds_have_each_kind_of_fault_under_each_strategy(first):
    plans = [draw_plan(seed) for seed in range(first, first + 50)]
    found = {(plan.strategy, fault.kind) for plan in plans for fault in plan.faults}
    everything = {(strategy, kind) for strategy in STRATEGIES for kind in KINDS}
    # A `single` run without an evaluator has only one task, so no pair can be killed.
    assert found >= everything - {("single", "kill pair")}


def test_a_door_refuses_in_an_outage_and_opens_again():
    with socket.create_server((LOOPBACK, 0)) as server, Door(server.getsockname()[1]) as door:
        address = (LOOPBACK, door.port)
        before = socket.create_connection(address)
        inner, _ = server.accept()
        # Wait until data arrives, so that the proxy knows the connection and closes it in the
        # outage.
        before.sendall(b"x")
        assert inner.recv(1) == b"x"
        door.close_for(600, silent=False)
        assert before.recv(1) == inner.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        door.end_outage()
        with socket.create_connection(address) as after:
            after.sendall(b"x")
            again, _ = server.accept()
            assert again.recv(1) == b"x"
        for each in (before, inner, again):
            each.close()


def test_a_silent_door_passes_on_when_the_outage_ends():
    with socket.create_server((LOOPBACK, 0)) as server, Door(server.getsockname()[1]) as door:
        door.close_for(600, silent=True)
        with socket.create_connection((LOOPBACK, door.port)) as caller:
            caller.sendall(b"x")
            inner, _ = server.accept()
            with inner:
                inner.settimeout(0.05)
                with pytest.raises(TimeoutError):
                    inner.recv(1)
                inner.settimeout(None)
                door.end_outage()
                assert inner.recv(1) == b"x"


def test_runs_of_one_process_have_stores_of_their_own(tmp_path):
    for content in (b"1", b"2"):
        with store_below(tmp_path, has_outages=True) as store:
            assert store.names("run") == []
            storage.write_bytes(storage.join(store.root, "run", "a"), b"0")
            store.write("run/a", content)
            assert store.names("run") == ["run/a"]
            assert storage.read_bytes(storage.join(store.root, "run", "a")) == store.read("run/a")


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
        ((shard(0, [3, 5]),), "lost", "step-00000100 to step-00000300: it has other shards"),
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
