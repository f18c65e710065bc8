"""Which tasks each strategy needs, and which of them runs the outer loop."""

import pytest

from trainer.topology import TOPOLOGIES, Cluster, Task, leader, topology_of

SERVED = {"ps": 2, "worker": 3, "chief": 1}
TASKS = {
    "single": {"chief": 1},
    "async_parameter_server": SERVED,
    "sync_parameter_server": SERVED,
    "in_graph": SERVED,
    "multi_worker_mirrored": {"worker": 3},
}
CHIEF, FIRST, SECOND = Task(role="chief", index=0), *(Task(role="worker", index=i) for i in (0, 1))
PS = Task(role="ps", index=0)


def test_every_strategy_has_its_topology():
    assert set(TOPOLOGIES) == set(TASKS)


@pytest.mark.parametrize("strategy", TASKS)
def test_only_the_roles_that_a_strategy_uses_are_started(strategy):
    assert topology_of(strategy).tasks(servers=2, workers=3) == TASKS[strategy]


def test_who_leads_is_started_when_the_others_are_there():
    assert list(topology_of("in_graph").tasks(servers=1, workers=1)) == ["ps", "worker", "chief"]


@pytest.mark.parametrize("strategy", sorted(set(TASKS) - {"multi_worker_mirrored"}))
def test_a_chief_leads_and_only_the_chief(strategy):
    topology = topology_of(strategy)
    assert [task for task in (CHIEF, PS, FIRST, SECOND) if topology.leads(task)] == [CHIEF]


def test_all_mirrored_workers_run_the_outer_loop():
    topology = topology_of("multi_worker_mirrored")
    assert [task for task in (PS, FIRST, SECOND) if topology.leads(task)] == [FIRST, SECOND]


def test_a_users_own_strategy_gets_all_roles():
    assert topology_of("my.own:Strategy").tasks(servers=2, workers=3) == SERVED


@pytest.mark.parametrize(
    ("addresses", "task"),
    [
        ({"chief": ("a:1",), "worker": ("a:2", "a:3")}, CHIEF),
        ({"chief": ("a:1",)}, CHIEF),
        ({"worker": ("a:2", "a:3")}, FIRST),
        ({"ps": ("a:1",), "worker": ("a:2",)}, FIRST),
    ],
)
def test_the_chief_publishes_or_worker_0_where_there_is_none(addresses, task):
    assert leader(Cluster(addresses=addresses)) == task
