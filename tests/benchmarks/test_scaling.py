"""The fit of constants to runs, the runs themselves, and the pages generated from them."""

from dataclasses import replace

import pytest

from benchmarks.scaling import gradient, measure
from benchmarks.scaling.costs import Costs, Model, measured, sharing_cache, work_of
from benchmarks.scaling.fit import Point, fit, rate
from benchmarks.scaling.gradient import MODELS
from benchmarks.scaling.measure import Case, cases, point
from benchmarks.scaling.page import BEGIN, END, measured_part, put_in
from benchmarks.scaling.simulation import Dispatch, Fleet, Work, simulated
from benchmarks.watched import Look, Used

CORES = 2
TRUE = Costs(
    worker_update=5e-4,
    worker_message=2e-4,
    worker_byte=1e-9,
    batch=0.0,
    gradient=1.5,
    worker_loop=3e-4,
    server_message=4e-4,
    server_byte=1e-9,
    server_loop=2e-4,
    server_share=0.1,
    chief_share=0.02,
    system_share=0.1,
    cold=0.5,
    aside=0.6,
    loopback_byte=4e-10,
    loopback=5e-5,
    dispatch=Dispatch(closure=2e-3, look=1e-3),
    memory=dict.fromkeys(("chief", "ps", "worker"), (7e8, 1.5)),
)
SIZES = {"small": (40_000, 1e-4), "large": (3_000_000, 2e-3)}


def made_up(model, workers=2, pull_every=1, servers=1, **more):
    """Return a simulated run on a machine whose constants are `TRUE`."""
    size, gradient = SIZES[model]
    held = (size // servers,) * servers
    found = Model(gradient=gradient, held=held, pull_every=pull_every)
    fleet = Fleet(workers=workers, cores=CORES, round_trip=TRUE.loopback)
    work = work_of(TRUE, found, workers=workers, cores=CORES)
    speed = simulated(work, fleet, TRUE.dispatch).rate
    looped = TRUE.dispatch.unit(speed, workers, 1) == 1 or more.get("looped", False)
    crowd = sharing_cache(TRUE.cold, workers, CORES)
    own = TRUE.worker_update + TRUE.worker_message * (servers - 1) + TRUE.worker_byte * sum(held)
    own += pull_every * TRUE.gradient * gradient + looped * TRUE.worker_loop
    serving = servers * (TRUE.server_message + looped * TRUE.server_loop)
    serving += TRUE.server_byte * sum(held) + servers * TRUE.server_share / speed
    return Point(
        model=model,
        held=held,
        gradient=gradient,
        workers=workers,
        pull_every=pull_every,
        worker=own * crowd,
        server=serving,
        chief=(TRUE.chief_share + TRUE.dispatch.look * workers) / speed,
        rate=speed,
        memory={"chief": 8 * 10**8, "ps": 6 * 10**8, "worker": 9 * 10**8},
        **more,
    )


@pytest.fixture(scope="module")
def points():
    return [
        *(made_up(model, pull_every=pull) for model in SIZES for pull in (1, 10)),
        made_up("small", workers=1),
        made_up("small", workers=4),
        made_up("small", workers=16),
        made_up("small", workers=20),
        made_up("small", servers=4),
        made_up("small", looped=True),
        made_up("small", workers=8, fitted=False),
    ]


@pytest.fixture(scope="module")
def found(points):
    return fit(points, CORES)


@pytest.mark.slow
def test_constants_are_found_again(found):
    for name in ("worker_message", "worker_byte", "gradient", "server_message", "server_byte"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name
    for name in ("worker_update", "worker_loop", "server_loop", "server_share", "chief_share"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.15), name
    assert found.cold == pytest.approx(TRUE.cold, abs=0.06)
    assert found.system_share == pytest.approx(TRUE.system_share, abs=0.05)
    for name in ("aside", "loopback_byte", "loopback"):
        assert getattr(found, name) == getattr(TRUE, name), name
    assert found.dispatch.look == pytest.approx(TRUE.dispatch.look, rel=0.15)


@pytest.mark.slow
def test_runs_that_nothing_is_fitted_to_are_predicted(points, found):
    for each in points:
        if not each.looped:
            assert rate(found, each, CORES) == pytest.approx(each.rate, rel=0.15)


@pytest.mark.slow
def test_no_constant_is_below_zero(points):
    # In these runs, servers need less time for more bytes.
    noisy = [replace(p, server=40 / sum(p.held), worker=1e-3 * p.pull_every) for p in points]
    found = fit(noisy[:5], CORES)
    assert min(value for value in vars(found).values() if isinstance(value, float)) >= 0


@pytest.mark.slow
def test_a_chief_that_was_too_fast_to_be_measured_is_left_out(points, found):
    unseen = replace(points[0], chief=0.0)
    share = fit([unseen, *points[1:]], CORES).chief_share
    assert share == pytest.approx(found.chief_share, rel=0.15)


def look(step, time, **seconds):
    tasks = {
        name.replace("_", "-"): Used(resident_bytes=int(each), cpu_seconds=each)
        for name, each in seconds.items()
    }
    return Look(global_step=step, time=time, tasks=tasks)


def test_a_point_is_what_was_used_between_two_looks():
    looks = (
        look(100, 50.0, chief_0=9.0, ps_0=5.0, worker_0=4.0, worker_1=4.0),
        look(300, 54.0, chief_0=9.2, ps_0=6.0, worker_0=5.0, worker_1=7.0),
    )
    case = Case(model="softmax", workers=2, pull_every=1, steps=4000)
    found = point(case, {"held": {"1": [31_400]}, "gradient": 1e-3}, looks)
    assert found.rate == 50
    assert found.worker == pytest.approx(4.0 / 200)
    assert found.server == pytest.approx(1.0 / 200)
    assert found.chief == pytest.approx(0.2 / 200)
    assert found.memory == {"chief": 9, "ps": 6, "worker": 7}
    assert found.held == (31_400,)
    assert found.fitted
    assert not found.looped


@pytest.mark.slow
def test_the_part_has_all_runs(points):
    part = measured_part(points, TRUE, CORES, 3)
    rows = [line for line in part.splitlines() if line.startswith("| ")]
    assert len([row for row in rows if row.startswith(("| small", "| large"))]) == 10
    assert "for rows that nothing is fitted to" in part
    far = [
        row for row in rows if row.count("%") == 1 and abs(int(row.split("|")[7].strip(" %"))) > 15
    ]
    assert part.count("`pull_every` 1: ") + part.count("`pull_every` 10: ") == len(far)
    assert ("above the aim of 15%: none." in part) == (not far)
    wrong = [replace(points[0], rate=2 * points[0].rate), *points[1:]]
    words = f"above the aim of 15%: {points[0].model} with {points[0].workers} workers"
    assert words in measured_part(wrong, TRUE, CORES, 3)


def test_a_page_keeps_what_people_have_written():
    page = f"# A\n\nBefore.\n\n{BEGIN}old\n{END}\nAfter.\n"
    once = put_in(page, "new")
    assert once == f"# A\n\nBefore.\n\n{BEGIN}\nnew\n\n{END}\nAfter.\n"
    assert put_in(once, "new") == once


def test_of_each_case_the_run_of_median_speed_counts(monkeypatch, tmp_path):
    wanted, one = list(cases()), made_up("small")
    rates = {str(case): iter([200.0, 100.0, 400.0]) for case in wanted}
    monkeypatch.setattr(measure.launched, "prepared", lambda _folder, _settings: "dataset")
    monkeypatch.setattr(gradient, "measured", lambda: {name: {} for name in MODELS})

    def run(case, _found, _dataset, workdir):
        assert not workdir.exists()
        workdir.mkdir()
        return replace(one, workers=case.workers, rate=next(rates[str(case)]))

    monkeypatch.setattr(measure, "measured", run)
    said = []
    found = measure.all_measured(tmp_path, 3, said.append)
    assert [each.rate for each in found] == [200.0] * len(wanted)
    assert [each.workers for each in found] == [case.workers for case in wanted]
    # Rounds run one after another, so that a slow minute affects only one round.
    assert said[0].replace("1 of", "2 of") == said[len(wanted)]


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
    # With a core for each worker, no cache is shared.
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


@pytest.mark.slow
def test_a_gradient_is_measured_on_one_core(monkeypatch):
    monkeypatch.setattr(gradient, "STEPS", 2)
    found = gradient.gradient_of("softmax")
    assert 0 < found["gradient"] < 1
    assert found["held"]["1"] == [4 * (784 * 10 + 10)]
    assert sum(found["held"]["2"]) == found["held"]["1"][0]


FREE = Dispatch(seconds=3.0)
WORK = Work(compute=0.010, pull=(0.001,), push=(0.001,), wire=(0.002,))
ALONE = Fleet(workers=1, spread=0.0, round_trip=0.001, server_cores=1)


def run(work=WORK, fleet=ALONE, dispatch=FREE, **more):
    return simulated(work, fleet, dispatch, **more)


def test_one_worker_is_the_sum_of_its_phases():
    # A cycle consists of two round trips, a pull and a push on the server, both directions of the
    # network, and one computation.
    found = run(replace(WORK, compute=0.030))
    assert found.cycle == pytest.approx(0.038)
    # Taking a turn needs another round trip.
    assert found.rate == pytest.approx(1 / 0.039, rel=0.01)
    assert found.limit == "workers"


@pytest.mark.parametrize("workers", [1, 3, 20])
def test_updates_are_the_sum_of_what_workers_pushed(workers):
    found = run(fleet=replace(ALONE, workers=workers, kill_every=0.3, restart=0.1))
    assert found.updates == sum(found.gradients)
    assert found.kills
    synchronous = run(fleet=replace(ALONE, workers=workers, needed=max(1, workers - 1), spread=0.3))
    used = synchronous.updates * max(1, workers - 1)
    # Gradients for the step that is open when counting ends are neither used nor dropped.
    assert abs(sum(synchronous.gradients) - synchronous.dropped - used) <= workers


def test_littles_law():
    found = run(fleet=replace(ALONE, workers=30))
    # The number of workers in the system is the rate times the duration of an update.
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
    # Background work overlaps if a core is free.
    assert run(work, replace(shared, workers=1)).rate > 1.2 * 100


def test_backup_workers_do_not_wait_for_stragglers():
    slow = replace(ALONE, workers=20, server_cores=20, slow=0.1, slow_by=5.0)
    work = replace(WORK, wire=(0.0,), compute=0.1)
    everyone = run(work, replace(slow, needed=20)).rate
    backed = run(work, replace(slow, needed=18)).rate
    assert backed > 3 * everyone
    healthy = run(work, replace(slow, needed=20, slow=0.0)).rate
    assert backed == pytest.approx(healthy, rel=0.1)


def test_workers_that_get_no_update_wait_for_the_end_of_a_stretch():
    long = replace(WORK, compute=60.0)
    found = run(long, replace(ALONE, workers=100))
    assert found.limit == "waiting for workers"
    assert found.rate < 100 / 60 / 2
    longer = run(long, replace(ALONE, workers=100), replace(FREE, seconds=600.0))
    assert longer.rate > 2 * found.rate
