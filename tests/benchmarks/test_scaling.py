"""The model of cost: its constants come from runs, and what follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.scaling import measure
from benchmarks.scaling.__main__ import PAGE
from benchmarks.scaling.measure import LOOPED as LOOPED_CASE
from benchmarks.scaling.measure import MODELS, WORKERS, Case, cases, point, sizes
from benchmarks.scaling.model import (
    OF_A_WORKER,
    Costs,
    Fleet,
    Point,
    _closures,
    fit,
    on_one_machine,
    predicted,
    shares,
    too_few_for_turns,
)
from benchmarks.scaling.page import BEGIN, END, measured_part, put_in
from benchmarks.watched import Look, Used
from tests.conftest import ROOT
from tests.docs.markdown import page as markdown
from trainer.strategies.async_parameter_server import LONG_RUN, portions

TRUE = Costs(
    worker_message=1e-3,
    worker_byte=2e-9,
    worker_loop=6e-4,
    server_message=5e-4,
    server_byte=1e-9,
    server_loop=4e-4,
    closure=5e-3,
    chief_share=0.02,
    gradient={"small": 1e-4, "large": 1e-3},
)
SIZES = {"small": 40_000, "large": 4_000_000}
FLEET = Fleet(workers=100, servers=10, server_cores=4, bytes_per_second=1.25e9, round_trip=2e-4)

# A chief that costs nothing, and a network that never is the limit.
FREE = replace(TRUE, closure=1e-9, chief_share=0.0)
FAST = replace(FLEET, bytes_per_second=1.25e10)


def made_up(model, pull_every, workers=2):
    size = SIZES[model]
    rate = {"small": 1000.0, "large": 400.0}[model] / pull_every
    looped = too_few_for_turns(rate, workers)
    # A second of updates is dealt out over two workers, in closures of up to 100.
    closures = 10.0 if rate == 1000 else 2 * OF_A_WORKER
    return Point(
        model=model,
        bytes=size,
        workers=workers,
        pull_every=pull_every,
        worker=TRUE.worker(size, looped=looped) + pull_every * TRUE.gradient[model],
        server=TRUE.server(size, looped=looped),
        chief=(TRUE.chief_share + TRUE.closure * closures) / rate,
        rate=rate,
    )


POINTS = [made_up(model, pull) for model in SIZES for pull in (1, 10)]
LOOPED = replace(
    POINTS[0],
    worker=POINTS[0].worker + TRUE.worker_loop,
    server=POINTS[0].server + TRUE.server_loop,
)


def test_constants_are_found_again():
    # Some in turns, and some too slow for them.
    assert {too_few_for_turns(p.rate, p.workers) for p in POINTS} == {False, True}
    found = fit(POINTS, LOOPED)
    for name in (
        "worker_message",
        "worker_byte",
        "worker_loop",
        "server_message",
        "server_byte",
        "server_loop",
        "closure",
        "chief_share",
    ):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6)
    assert found.gradient == pytest.approx(TRUE.gradient)


def test_no_constant_is_below_zero():
    noisy = [
        replace(p, server=1e-3 / p.bytes, worker=1e-9 * p.bytes * p.pull_every) for p in POINTS
    ]
    found = fit(noisy, noisy[0])
    assert found.server_byte == 0
    assert found.server_message > 0
    assert min(found.worker_message, found.worker_byte, *found.gradient.values()) >= 0


def test_the_chief_is_fitted_to_all_and_the_others_to_runs_like_the_looped_one():
    crowd = [replace(p, workers=8, worker=9.0, server=9.0) for p in POINTS]
    crowd = [
        replace(p, chief=(TRUE.chief_share + TRUE.closure * _closures(p.rate, 8)) / p.rate)
        for p in crowd
    ]
    found = fit([*POINTS, *crowd], LOOPED)
    assert found.closure == pytest.approx(TRUE.closure, rel=1e-6)
    assert found.worker_message == pytest.approx(TRUE.worker_message, rel=1e-6)
    assert found.server_byte == pytest.approx(TRUE.server_byte, rel=1e-6)


@pytest.mark.parametrize("points", [POINTS[::2], POINTS[:2]])
def test_too_few_runs_tell_no_constants(points):
    with pytest.raises(ValueError, match="one place"):
        fit(points, points[0])


def test_a_variable_is_on_one_server_as_a_whole():
    assert sorted(shares([100, 10, 10, 10], 2)) == [30, 100]
    assert sorted(shares([10, 10, 10, 10], 2)) == [20, 20]
    assert sum(shares([7, 5, 3], 10)) == 15


@pytest.mark.parametrize(
    ("costs", "fleet", "limit"),
    [
        (TRUE, replace(FLEET, workers=1), "workers"),
        (FREE, replace(FAST, workers=10_000), "processor of the fullest server"),
        (
            replace(FREE, server_message=1e-6, server_byte=0.0),
            replace(FLEET, workers=10_000),
            "network of the fullest server",
        ),
        (replace(TRUE, closure=5.0), FLEET, "chief"),
    ],
)
def test_what_is_short_is_named(costs, fleet, limit):
    found = predicted(costs, fleet, "large", [4_000_000], 1)
    assert found.limit == limit


def test_rates_follow_from_the_costs():
    # 1 ms of message, 8 ms of bytes, 1 ms of gradient; 4.5 of the server, 1 of the loop; 2 x
    # (0.2 + 3.2) ms on the way.
    alone = predicted(TRUE, replace(FLEET, workers=1), "large", [4_000_000], 1)
    assert alone.rate == pytest.approx(1 / 22.3e-3)
    # A message more, and half of the bytes for each server.
    two = predicted(TRUE, replace(FLEET, workers=1), "large", [2_000_000] * 2, 1)
    assert two.rate == pytest.approx(1 / 21.3e-3)
    # 3.2 ms for the bytes, all on one server.
    many = predicted(FREE, replace(FLEET, workers=10_000), "large", [4_000_000], 1)
    assert many.rate == pytest.approx(1 / 3.2e-3)
    # 0.5 ms + 4 ms on one of four cores, 0.4 of the loop.
    many = predicted(FREE, replace(FAST, workers=10_000), "large", [4_000_000], 1)
    assert many.rate == pytest.approx(4 / 4.9e-3)
    spread = predicted(FREE, replace(FAST, workers=10_000), "large", [400_000] * 10, 1)
    assert spread.rate == pytest.approx(4 / 1.3e-3)
    # 1 + 0.08 + 10 x 0.1 ms, 0.54 of the server, and 2 x (0.2 + 0.032) ms on the way.
    rare = predicted(TRUE, replace(FLEET, workers=1), "small", [40_000], 10)
    assert rare.rate == pytest.approx(1 / 3.084e-3)


@pytest.mark.parametrize(("workers", "steps"), [(57, 100), (58, 5), (196, 5), (197, 1)])
def test_a_chief_with_too_many_workers_hands_out_small_closures(workers, steps):
    # 196 closures in the second of a stretch.
    slow = replace(TRUE, server_message=1e-9, server_byte=0.0, worker_message=0.0)
    fleet = replace(FAST, workers=workers, round_trip=0.0)
    found = predicted(slow, fleet, "small", [40_000], 1)
    assert (found.limit, found.rate) == ("chief", pytest.approx(196 * steps))


def test_portions_are_counted_as_they_are_handed_out():
    for rate, workers in [(600, 2), (500, 100), (4000, 8), (50, 100)]:
        assert _closures(rate, workers) == pytest.approx(len(portions(rate, workers, 1)), rel=0.25)


def test_one_machine_shares_its_cores():
    one = made_up("small", 1, workers=1)
    # 1.18 ms of the worker, 0.54 of the server, 0.05 of the chief, and 2 % of a core for it.
    assert on_one_machine(TRUE, one, cores=1) == pytest.approx(0.98 / 1.77e-3)
    # One worker keeps no more than one core busy at a time.
    assert on_one_machine(TRUE, one, cores=8) == pytest.approx(1 / 1.72e-3)
    assert on_one_machine(TRUE, replace(one, workers=2), cores=2) == pytest.approx(1.98 / 1.77e-3)
    # Eight get 27 closures of 5 ms in a second, however many updates they hold.
    crowd = on_one_machine(TRUE, replace(one, workers=8), cores=2)
    assert crowd == pytest.approx((1.98 - 8 * OF_A_WORKER * 5e-3) / 1.72e-3)


def test_every_constant_has_the_runs_that_tell_it():
    found = list(cases())
    assert {case.workers for case in found} == set(WORKERS) == {1, 2, 4, 8, 16}
    for model in MODELS:
        assert {case.pull_every for case in found if case.model == model} == {1, 10}
    assert len(found) == len({(c.model, c.workers, c.pull_every) for c in found})
    assert all(measure.FIRST * case.steps >= 100 for case in found)
    # A long run is like the one that has too few steps for turns.
    assert LOOPED_CASE.steps < LONG_RUN
    (like,) = (c for c in found if (c.model, c.workers, c.pull_every) == ("784-100-10", 2, 1))
    assert like.steps >= LONG_RUN
    cut = {"steps": LOOPED_CASE.steps, "checkpoint_every": LOOPED_CASE.checkpoint_every}
    assert replace(like, **cut) == LOOPED_CASE
    # It is looked at where a stretch ends.
    first, last = (int(share * LOOPED_CASE.steps) for share in (measure.FIRST, measure.LAST))
    every = LOOPED_CASE.checkpoint_every
    assert first == every
    assert 2 * every < last < 3 * every < LOOPED_CASE.steps


def test_sizes_are_those_of_the_model():
    assert [sum(sizes(model)) for model in MODELS] == [31_400, 318_040, 3_180_040]


def look(step, time, **seconds):
    tasks = {
        name.replace("_", "-"): Used(resident_bytes=1, cpu_seconds=each)
        for name, each in seconds.items()
    }
    return Look(global_step=step, time=time, tasks=tasks)


def test_a_point_is_what_was_used_between_two_looks():
    looks = (
        look(100, 50.0, chief_0=9.0, ps_0=5.0, worker_0=4.0, worker_1=4.0),
        look(300, 54.0, chief_0=9.2, ps_0=6.0, worker_0=5.0, worker_1=7.0),
    )
    found = point(Case(model="softmax", workers=2, pull_every=1, steps=400), 31_400, looks)
    assert found.rate == 50
    assert found.worker == pytest.approx(4.0 / 200)
    assert found.server == pytest.approx(1.0 / 200)
    assert found.chief == pytest.approx(0.2 / 200)


def test_the_part_has_all_runs_and_predictions():
    part = measured_part(
        POINTS, fit(POINTS, LOOPED), {name: [each] for name, each in SIZES.items()}, 2
    )
    rows = [line for line in part.splitlines() if line.startswith("| ")]
    assert len([row for row in rows if row.startswith(("| small", "| large"))]) == 4 + 2 * 2 * 2
    assert len([row for row in rows if "gradient` of" in row]) == 2
    assert "| `server_byte` | 1.000 ms a megabyte |" in rows
    assert "| `closure` | 5.000 ms of the chief |" in rows
    assert part.count("100 | 10 |") == 4


def test_a_page_keeps_what_people_have_written():
    page = f"# A\n\nBefore.\n\n{BEGIN}old\n{END}\nAfter.\n"
    once = put_in(page, "new")
    assert once == f"# A\n\nBefore.\n\n{BEGIN}\nnew\n\n{END}\nAfter.\n"
    assert put_in(once, "new") == once


@pytest.mark.parametrize("page", ["no part", f"{BEGIN}{END}{BEGIN}{END}", BEGIN])
def test_a_page_without_its_place_is_left_alone(page):
    with pytest.raises(ValueError, match="needs one line"):
        put_in(page, "new")


def test_the_document_has_the_place():
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    written = put_in(text, "| a |\n|---|\n| b |")
    assert "\n| b |\n" in written
    assert markdown(ROOT / PAGE, written).fragments() == markdown(ROOT / PAGE, text).fragments()


def test_of_each_case_the_run_of_median_speed_counts(monkeypatch, tmp_path):
    rates = {name: iter([200.0, 100.0, 400.0]) for name in map(str, [*cases(), LOOPED_CASE])}
    monkeypatch.setattr(measure.launched, "prepared", lambda _folder, _settings: "dataset")

    def measured(case, _dataset, workdir):
        assert not workdir.exists()
        workdir.mkdir()
        rate = next(rates[str(case)])
        return replace(made_up("small", case.pull_every, case.workers), rate=rate)

    monkeypatch.setattr(measure, "measured", measured)
    said = []
    found = measure.all_measured(tmp_path, said.append)
    assert [each.rate for each in found] == [200.0] * len(rates)
    assert [each.workers for each in found] == [case.workers for case in [*cases(), LOOPED_CASE]]
    # A round after the other, so that a slow minute is one of one round.
    assert said[0].replace("1 of", "2 of") == said[len(rates)]
