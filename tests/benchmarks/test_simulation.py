"""Properties of the simulation that do not depend on its constants."""

from dataclasses import replace

import pytest

from benchmarks.scaling.simulation import Dispatch, Fleet, Work, simulated

FREE = Dispatch(seconds=3.0)
WORK = Work(compute=0.010, pull=(0.001,), push=(0.001,), wire=(0.002,))
ALONE = Fleet(workers=1, spread=0.0, round_trip=0.001, server_cores=1)


def run(work=WORK, fleet=ALONE, dispatch=FREE, **more):
    return simulated(work, fleet, dispatch, **more)


def test_one_worker_is_the_sum_of_its_phases():
    # Two round trips, both services, both ways on the wire, one computation.
    found = run(replace(WORK, compute=0.030))
    assert found.cycle == pytest.approx(0.038)
    # And a round trip more to take a turn.
    assert found.rate == pytest.approx(1 / 0.039, rel=0.01)
    assert found.limit == "workers"


@pytest.mark.parametrize("workers", [1, 3, 20])
def test_updates_are_the_sum_of_what_workers_pushed(workers):
    found = run(fleet=replace(ALONE, workers=workers, kill_every=0.3, restart=0.1))
    assert found.updates == sum(found.gradients)
    assert found.kills
    synchronous = run(fleet=replace(ALONE, workers=workers, needed=max(1, workers - 1), spread=0.3))
    used = synchronous.updates * max(1, workers - 1)
    # What is announced of the step that is open when counting ends is neither used nor dropped.
    assert abs(sum(synchronous.gradients) - synchronous.dropped - used) <= workers


def test_littles_law():
    found = run(fleet=replace(ALONE, workers=30))
    # Workers in the system: the rate times the time that each update takes.
    taking = found.rate * ALONE.round_trip
    assert found.rate * found.cycle + taking == pytest.approx(30, rel=0.1)


def test_a_queue_serves_no_more_than_it_can_and_nearly_that():
    crowd = replace(ALONE, workers=200)
    by_processor = run(work=replace(WORK, wire=(0.0,)), fleet=crowd)
    assert by_processor.limit == "server processor"
    assert by_processor.rate == pytest.approx(1 / 0.002, rel=0.05)
    by_wire = run(fleet=replace(crowd, server_cores=8))
    assert by_wire.limit.startswith("server network")
    assert by_wire.rate == pytest.approx(1 / 0.002, rel=0.05)
    assert by_wire.rate <= 1 / 0.002 * 1.001
    by_chief = run(fleet=crowd, dispatch=replace(FREE, closure=1.0))
    assert by_chief.limit == "chief"


def test_faster_networks_more_workers_and_more_servers_are_not_slower():
    fleet = replace(ALONE, workers=20)
    rates = [run(replace(WORK, wire=(wire,)), fleet).rate for wire in (0.02, 0.005, 0.001, 0.0)]
    assert rates == sorted(rates)
    rates = [run(fleet=replace(ALONE, workers=n)).rate for n in (1, 2, 4, 8)]
    assert rates == sorted(rates)
    halves = replace(WORK, pull=(5e-4,) * 2, push=(5e-4,) * 2, wire=(1e-3,) * 2)
    assert run(halves, replace(fleet, workers=200)).rate > 1.8 * run(fleet=fleet).rate * 0.99


def test_all_tasks_of_one_machine_share_its_cores():
    work = Work(compute=0.006, aside=0.002, pull=(0.001,), push=(0.001,))
    shared = Fleet(workers=8, cores=2, spread=0.0)
    assert run(work, shared).rate == pytest.approx(2 / 0.010, rel=0.05)
    assert run(work, shared).limit == "cores"
    # What is done aside overlaps, where a core is free for it.
    assert run(work, replace(shared, workers=1)).rate > 1.2 * 100


def test_backup_workers_do_not_wait_for_stragglers():
    slow = replace(ALONE, workers=20, server_cores=20, slow=0.1, slow_by=5.0)
    work = replace(WORK, wire=(0.0,), compute=0.1)
    everyone = run(work, replace(slow, needed=20)).rate
    backed = run(work, replace(slow, needed=18)).rate
    assert backed > 3 * everyone
    healthy = run(work, replace(slow, needed=20, slow=0.0)).rate
    assert backed == pytest.approx(healthy, rel=0.1)


def test_killed_workers_cost_their_own_time():
    fleet = replace(ALONE, workers=20, server_cores=20)
    work = replace(WORK, wire=(0.0,), compute=0.1)
    dispatch = Dispatch(seconds=100.0)
    whole = run(work, fleet, dispatch, stretches=1)
    killed = run(work, replace(fleet, kill_every=10.0, restart=10.0), dispatch, stretches=1)
    assert killed.kills > 50
    assert 0.35 < killed.rate / whole.rate < 0.65


def test_workers_that_get_no_update_wait_for_the_end_of_a_stretch():
    long = replace(WORK, compute=60.0)
    found = run(long, replace(ALONE, workers=100))
    assert found.limit == "waiting for workers"
    assert found.rate < 100 / 60 / 2
    longer = run(long, replace(ALONE, workers=100), replace(FREE, seconds=600.0))
    assert longer.rate > 2 * found.rate


def test_a_chief_sends_workers_into_a_stretch_one_after_the_other():
    long = replace(WORK, compute=1.0)
    fleet = replace(ALONE, workers=100)
    slow = run(long, fleet, Dispatch(closure=0.1))
    assert slow.rate < 0.8 * run(long, fleet, Dispatch()).rate
    # What it does in a stretch does not depend on how many updates it has.
    longer = run(long, fleet, Dispatch(closure=0.1, seconds=200.0))
    assert longer.rate > 0.95 * run(long, fleet, Dispatch(seconds=200.0)).rate


def test_updates_are_taken_one_by_one_where_they_are_slow():
    assert FREE.unit(80, 2, now=1) == FREE.turn
    assert FREE.unit(79, 2, now=1) == 1
    assert FREE.unit(40, 2, now=FREE.turn) == FREE.turn
    assert FREE.unit(39, 2, now=FREE.turn) == 1
    assert FREE.steps(1000) == 3000


def test_turns_are_taken_only_where_single_updates_are_fast_enough():
    # In turns each of them makes more than 40 updates in a second, and one by one less.
    sharing = replace(ALONE, workers=16, cores=2)
    work = Work(compute=5e-4, pull=(5e-4,), push=(5e-4,), wire=(0.0,), loop=(4e-3, 0.0))
    found = run(work, sharing)
    assert found.rate / 16 < FREE.turns_from
    assert run(replace(work, loop=(0.0, 0.0)), sharing).rate / 16 > FREE.turns_from


def test_the_same_seed_is_the_same_fleet():
    fleet = replace(ALONE, workers=10, spread=0.5)
    assert run(fleet=fleet) == run(fleet=fleet)
    assert run(fleet=fleet, seed=1) != run(fleet=fleet)
