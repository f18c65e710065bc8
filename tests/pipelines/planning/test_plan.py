"""Plans of a model whose measurements are made up, and refusals in one line each."""

import json
from dataclasses import replace

import pytest

from pipelines.cli.plan import _table
from pipelines.planning import plan
from pipelines.planning.costs import (
    MEASURED,
    Model,
    from_tree,
    measured,
    sharing_cache,
    work_of,
)
from trainer.config.load import load_config
from trainer.errors import ConfigError

CALIBRATION = {
    "gradient": 0.01,
    "bytes": 4_000_000,
    "slots": 8_000_000,
    "held": {"1": [4_000_000], "2": [2_000_000] * 2, "4": [1_000_000] * 4},
    "step_bytes": 50_000_000,
    "gpu": False,
}
NUMBERS = {
    "cores": 0,
    "worker_cores": 1,
    "server_cores": 4,
    "bandwidth": 10.0,
    "round_trip": 0.2,
    "gradient": 0.0,
}


def config(*settings):
    return load_config(None, ["data.shards=64", *settings])


def options(workers="1,8,32", servers="1,4", prices=(), **numbers):
    given = {"workers": workers, "servers": servers}
    return plan.options_of(given, prices, {**NUMBERS, **numbers})


def plans(*settings, **given):
    loaded = config(*settings)
    return plan.plans_of(
        loaded, plan.with_counts(loaded, options(**given)), CALIBRATION, measured()
    )


def test_every_number_of_tasks_is_planned_and_the_configured_one_too():
    found = plans()
    assert {(p.workers, p.servers) for p in found.plans} == {
        (w, s) for w in (1, 2, 8, 32) for s in (1, 4)
    }
    assert (found.configured.workers, found.configured.servers) == (2, 1)
    for each in found.plans:
        assert each.seconds == pytest.approx(1500 / each.rate)
        assert each.examples == pytest.approx(each.rate * 64)
        assert each.cost == 0
    json.dumps(plan.as_tree(found))


@pytest.mark.slow
def test_what_is_proposed_is_nearly_the_fastest_with_fewest_tasks_or_the_least_cost():
    found = plans()
    fastest = max(p.rate for p in found.plans)
    enough = [p for p in found.plans if p.rate >= 0.9 * fastest]
    assert found.proposed in enough
    tasks = found.proposed.workers + found.proposed.servers
    assert tasks == min(p.workers + p.servers for p in enough)
    priced = plans(prices=("worker=1", "ps=2", "chief=0.5"))
    one = priced.configured
    assert one.cost == pytest.approx((2 * 1 + 2 + 0.5) * one.seconds / 3600)
    assert priced.proposed.cost == min(p.cost for p in priced.plans if p.rate >= 0.9 * fastest)


def test_memory_is_that_of_the_process_and_of_what_it_holds():
    found = plans()
    one, four = (p.memory for p in found.plans if p.workers == 8)
    costs = measured()
    base, each = costs.memory["ps"]
    assert one["ps"] == pytest.approx(base + each * 12_000_000, abs=1)
    assert four["ps"] == pytest.approx(base + each * 3_000_000, abs=1)
    assert one["worker"] > costs.memory["worker"][0]


@pytest.mark.slow
def test_memory_of_snapshots_is_that_of_another_server_or_on_the_chief():
    plain, copied = plans(), plans("cluster.snapshot_seconds=1")
    costs = measured()
    for before, after in zip(plain.plans, copied.plans, strict=True):
        role = "ps" if before.servers > 1 else "chief"
        _, each = costs.memory[role]
        # A copy, and another one until that is complete.
        more = each * 2 * (3_000_000 if role == "ps" else 12_000_000)
        assert after.memory[role] - before.memory[role] == pytest.approx(more, abs=1)
        others = before.memory.keys() - {role}
        assert all(after.memory[each] == before.memory[each] for each in others)


def test_one_machine_is_not_faster_with_more_workers_than_cores():
    found = plans(cores=2, servers="1")
    by_workers = {p.workers: p.rate for p in found.plans}
    assert by_workers[32] < 1.2 * by_workers[2]


def test_a_run_too_short_for_turns_is_slower():
    short, long = (
        plans(f"training.steps={steps}", cores=2, gradient=1e-4) for steps in (1999, 2000)
    )
    assert short.configured.rate < 0.95 * long.configured.rate


def test_a_gradient_of_another_machine_replaces_the_measured_one():
    slow, fast = plans(gradient=1.0), plans(gradient=0.001)
    assert fast.configured.rate > 20 * slow.configured.rate


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"workers": "0"}, "--workers: '0' is no number from 1"),
        ({"workers": "2,x"}, "--workers: 'x' is no number"),
        ({"workers": ","}, "--workers: '' is no number"),
        ({"workers": "9" * 5000}, "--workers: '999999999"),
        ({"cores": 10**11}, "--cores: 100000000000 is not from 0 to 10000"),
        ({"prices": ("worker=1e308",)}, "--price: 'worker=1e308'"),
        ({"prices": ("worker=1", "worker=2")}, "--price: worker has two prices"),
        ({"servers": "4000"}, "--servers: '4000' is no number from 1 to 1000"),
        ({"prices": ("gpu=1",)}, "--price: 'gpu=1' is no price"),
        ({"prices": ("worker=cheap",)}, "--price: 'worker=cheap'"),
        ({"prices": ("worker=-1",)}, "--price: 'worker=-1'"),
        ({"prices": ("worker=nan",)}, "--price: 'worker=nan'"),
        ({"bandwidth": 0.0}, "--bandwidth: 0.0 is not from 0.001 to"),
        ({"round_trip": -1.0}, "--round-trip: -1.0 is not"),
        ({"gradient": float("inf")}, "--gradient: inf is not"),
        ({"server_cores": 0}, "--server-cores: 0 is not from 1 to"),
    ],
)
def test_a_wrong_option_is_one_line(given, words):
    with pytest.raises(ConfigError) as raised:
        options(**given)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_more_workers_than_shards_and_another_strategy_are_refused():
    with pytest.raises(ConfigError, match="128 workers and 64 shards"):
        plan.with_counts(config(), options(workers="128"))
    said = []
    with pytest.raises(ConfigError, match="async_parameter_server, whose costs are measured"):
        plan.planned(config("training.strategy=single"), options(), said.append)
    assert not said


def test_measured_constants_are_read_and_none_is_below_zero():
    tree = json.loads(MEASURED.read_text(encoding="utf-8"))
    costs = from_tree(tree["costs"])
    assert min(v for v in tree["costs"].values() if isinstance(v, float)) >= 0
    assert set(costs.memory) == {"chief", "ps", "worker"}
    assert tree["points"]


def test_work_grows_with_what_moves_and_with_gradients():
    costs = replace(measured(), worker_byte=1e-9, server_byte=1e-9, gradient=1.0, aside=0.5)
    one = work_of(costs, Model(gradient=0.1, held=(1_000_000,)))
    ten = work_of(costs, Model(gradient=0.1, held=(1_000_000,), pull_every=10))
    assert ten.compute + ten.aside > one.compute + one.aside + 0.89
    assert one.compute == one.aside
    # A server without a part of the model gets no message.
    two = work_of(costs, Model(gradient=0.1, held=(1_000_000, 0)), byte=1e-9)
    assert two.wire == (pytest.approx(1e-3),)
    shared = work_of(costs, Model(gradient=0.1, held=(1_000_000,)), cores=2)
    assert shared.compute >= one.compute


def test_workers_that_share_a_cache_are_slower_and_servers_are_not():
    costs = replace(measured(), cold=0.5, worker_loop=1e-3)
    model = Model(gradient=0.1, held=(1_000_000,))
    own, shared = (work_of(costs, model, workers=n, cores=2) for n in (2, 8))
    for each in (shared.compute / own.compute, shared.aside / own.aside):
        assert each == pytest.approx(1.5)
    assert shared.loop[0] == pytest.approx(1.5 * own.loop[0])
    assert (shared.push, shared.pull, shared.loop[1]) == (own.push, own.pull, own.loop[1])
    # With a core each there is nobody else's data in its cache.
    assert own == work_of(costs, model, workers=1, cores=2)
    assert work_of(costs, model, workers=10_000) == work_of(costs, model)
    assert sharing_cache(0.5, 8, 2) == pytest.approx(1.5)


def test_what_is_no_task_takes_a_share_of_one_machine_alone():
    model = Model(gradient=0.1, held=(1_000_000,))
    costs = replace(measured(), chief_share=0.0, server_share=0.0)
    less, more = (replace(costs, system_share=each) for each in (0.0, 0.5))
    shared = [work_of(each, model, cores=2).compute for each in (less, more)]
    assert shared[1] == pytest.approx(shared[0] / 0.75)
    assert work_of(less, model) == work_of(more, model)


def test_the_table_marks_what_is_configured_and_what_is_proposed():
    found = plans(prices=("worker=1",))
    lines = _table(found, has_prices=True).splitlines()
    assert len(lines) == 1 + len(found.plans)
    assert [("configured" in line) for line in lines].count(True) == 1
    (proposed,) = (line for line in lines if "proposed" in line)
    assert proposed.split()[:2] == [str(found.proposed.workers), str(found.proposed.servers)]
    assert "cost" in lines[0]
    assert "cost" not in _table(found, has_prices=False)
