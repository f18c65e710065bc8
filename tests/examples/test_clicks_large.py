"""The example dataset: days of clicks from documented distributions, with new ids each day."""

import hashlib
import json
import subprocess
import sys
import tracemalloc
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from clicks_large import PART, VISIT, ClicksLarge, Clickstream, Law

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.config.load import load_config
from flotilla.trainer.data.builders import datasets
from flotilla.trainer.data.prepare import newest_version, prepare
from flotilla.trainer.runtime.errors import ConfigError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "clicks_large"
OWN = "clicks_large:ClicksLarge"
SMALL = {"users": 2000, "items": 500, "new_users": 100, "new_items": 20, "events": 100_000}
LARGE = Clickstream()


def joined(parts):
    parts = list(parts)
    return {name: np.concatenate([each[name] for each in parts]) for name in parts[0]}


def area(labels, scores):
    order = np.argsort(np.argsort(scores)) + 1
    positive = labels.astype(bool)
    pairs = order[positive].sum() - positive.sum() * (positive.sum() + 1) / 2
    return pairs / (positive.sum() * (~positive).sum())


def test_they_are_the_same_everywhere_and_others_for_each_day_split_and_part():
    ids = b"".join(LARGE.draw(3, 0, 1)[name].tobytes() for name in ("user", "item"))
    assert hashlib.sha256(ids).hexdigest()[:16] == "cef30ff8f3e9f2d7"
    again, first = Clickstream().draw(3, 0, 1), LARGE.draw(3, 0, 1)
    for name, values in again.items():
        np.testing.assert_array_equal(values, first[name])
    for other in (LARGE.draw(4, 0, 1), LARGE.draw(3, 1, 1), LARGE.draw(3, 0, 2)):
        assert (other["item"] != first["item"]).mean() > 0.9


def test_ids_are_sparse_and_have_nothing_of_their_order():
    drawn = LARGE.draw(0, 0, 0)
    for name in ("user", "item"):
        ids = np.unique(drawn[name])
        assert ids.min() >= 0
        assert 2**51 < ids.max() < 2**52
        # For random numbers, the median gap is ln 2 times the mean gap.
        assert np.median(np.diff(ids)) == pytest.approx(2**52 / len(ids) * np.log(2), rel=0.1)


def test_popularity_follows_the_law_of_zipf():
    for exponent in (0.6, 1.0, 1.4):
        world = Clickstream(zipf=exponent, drift=0.0)
        items = joined(world.draw(0, 0, part) for part in range(3))["item"]
        count = np.sort(np.unique(items, return_counts=True)[1])[::-1]
        places = np.arange(4, 100)
        slope = np.polyfit(np.log(places + 1.5), np.log(count[places]), 1)[0]
        assert slope == pytest.approx(-exponent, abs=0.1)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_a_law_says_how_likely_its_ranks_are(exponent):
    law = Law(count=50, exponent=exponent, flat=2.0)
    shares = law.shares(np.arange(50))
    assert shares.sum() == pytest.approx(1)
    uniform = (np.arange(1 << 16) + 0.5) / (1 << 16)
    found = np.bincount(law.ranks(uniform), minlength=50) / (1 << 16)
    np.testing.assert_allclose(found, shares, atol=1e-4)


def test_items_come_as_often_as_the_truth_says():
    for day in (0, 13):
        world = Clickstream(**SMALL, drift=0.3)
        items = world.draw(day, 0, 0)["item"]
        ids, count = np.unique(items, return_counts=True)
        expected = PART * world.exposure(ids, day)
        assert expected.sum() == pytest.approx(PART, rel=0.01)
        assert np.abs(count - expected).max() < 6 * np.sqrt(expected.max())


def test_popularity_drifts_by_as_much_as_was_asked_for():
    everyone = Clickstream(**{**SMALL, "new_items": 0}, drift=0.1)
    ids = np.unique(joined(everyone.draw(0, 0, part) for part in range(3))["item"])
    days = [everyone.exposure(ids, day) for day in range(11)]
    moved = [np.abs(after - before).sum() / 2 for before, after in pairwise(days)]
    # With a drift of 0.1, all of the popularity moves within ten days, an equal share each day.
    np.testing.assert_allclose(moved, np.abs(days[10] - days[0]).sum() / 20, rtol=1e-6)
    assert sum(moved) > 0.5
    still = Clickstream(**{**SMALL, "new_items": 0}, drift=0.0)
    np.testing.assert_array_equal(still.exposure(ids, 0), still.exposure(ids, 10))


def test_tastes_turn():
    world = Clickstream(drift=0.1, segments=5000)
    users = np.arange(5000)

    def alike(day):
        return np.corrcoef(world.tastes(users, 0).ravel(), world.tastes(users, day).ravel())[0, 1]

    assert alike(0) == pytest.approx(1)
    assert alike(5) == pytest.approx(np.cos(np.pi / 4), abs=0.03)
    assert alike(10) == pytest.approx(0, abs=0.03)


@pytest.mark.parametrize("explained", [0.0, 0.3, 1.0])
def test_segment_and_category_explain_their_share(explained):
    world = Clickstream(explained=explained, segments=500, categories=500, drift=0.1)
    ids = np.arange(100_000)
    for groups, values in (
        (world.segment(ids), world.tastes(ids, 3)),
        (world.category(ids), world.features(ids)),
    ):
        known, where, count = np.unique(groups, return_inverse=True, return_counts=True)
        np.testing.assert_array_equal(known, np.arange(500))
        means = np.stack([np.bincount(where, each) / count for each in values.T])
        assert values.var() == pytest.approx(1, abs=0.1)
        assert means[:, where].var() / values.var() == pytest.approx(explained, abs=0.05)


def test_an_event_says_segment_and_category():
    drawn = LARGE.draw(5, 1, 0)
    np.testing.assert_array_equal(drawn["segment"], LARGE.segment(drawn["user"]))
    np.testing.assert_array_equal(drawn["category"], LARGE.category(drawn["item"]))
    shares = np.bincount(drawn["segment"]) / PART
    assert len(shares) == LARGE.segments
    assert shares.max() < 0.1


def test_each_day_has_new_ids_in_the_place_of_old_ones():
    world = Clickstream(**{**SMALL, "users": 200, "new_users": 10}, zipf=0.0)
    days = [joined(world.draw(day, 0, part) for part in range(2)) for day in (4, 5)]
    for name, count, new in (("item", 500, 20), ("user", 200, 10)):
        before, after = (np.unique(day[name]) for day in days)
        assert len(before) == len(after) == count
        assert len(np.setdiff1d(after, before)) == len(np.setdiff1d(before, after)) == new
    items = np.unique(days[1]["item"])
    fresh = np.setdiff1d(items, np.unique(days[0]["item"]))
    assert set(world.first_item(fresh)) == {5}
    assert world.exposure(fresh, 4).max() == 0
    assert world.exposure(fresh, 5).min() > 0
    assert set(world.impressions(fresh, 5)) == {0}
    kept = np.setdiff1d(items, fresh)
    assert world.impressions(kept, 5).mean() == pytest.approx(100_000 / 500, rel=0.01)


def test_those_who_come_most_come_again():
    days = [LARGE.draw(day, 0, 0)["user"] for day in (0, 1)]
    assert np.isin(days[1], days[0]).mean() > 0.5


def test_clicks_come_as_often_as_their_chances_say():
    drawn = LARGE.draw(2, 1, 0)
    chances = LARGE.chances(drawn["user"], drawn["item"], 2)
    order = np.argsort(chances)
    for rows in np.array_split(order, 8):
        assert drawn["label"][rows].mean() == pytest.approx(chances[rows].mean(), abs=0.02)
    assert 0.12 < drawn["label"].mean() < 0.25
    best = area(drawn["label"], chances)
    assert 0.9 < best < 0.93
    of_items = area(drawn["label"], LARGE.quality(drawn["item"]))
    assert 0.5 < of_items < 0.65
    assert area(drawn["label"], LARGE.chances(drawn["user"], drawn["item"], 40)) < best - 0.02


def test_a_visit_is_several_items():
    users = LARGE.draw(0, 0, 0)["user"].reshape(-1, VISIT)
    assert (users == users[:, :1]).all()


def test_no_table_of_users_or_items_is_held():
    tracemalloc.start()
    Clickstream(users=10**9, items=10**9).draw(7, 0, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A column of a billion numbers would need 8 GB.
    assert peak < 60_000_000


def test_a_dataset_is_made_of_the_events_of_its_days(tmp_path):
    args = {**SMALL, "events": 3000, "test_events": 500, "day": 6, "days": 2}
    config = DataConfig(dataset=OWN, builder_args=args, shards=2, group="user")
    made = prepare(config, storage.uri_of(tmp_path), tmp_path / "scratch")
    fields = made.manifest.fields
    assert {name: each["examples"] for name, each in fields["splits"].items()} == {
        "train": 5400, "validation": 600, "test": 500
    }  # fmt: skip
    assert fields["version"] == "1.1.6"
    assert set(fields["inputs"]) == {"category", "item", "segment", "shown"}
    assert (fields["targets"], fields["group"]) == (["label"], "user")
    assert not list(tmp_path.rglob("dataset_info.json"))


def test_days_take_turns_and_the_test_is_of_the_newest(tmp_path):
    found = ClicksLarge(
        day=6, days=2, events=2 * PART, test_events=PART, data_dir=tmp_path, **sizes()
    )
    world = found.clickstream
    parts = list(found.columns("train", 0, 4 * PART))
    expected = [world.draw(6, 0, 0), world.draw(5, 0, 0), world.draw(6, 0, 1), world.draw(5, 0, 1)]
    for own, other in zip(parts, expected, strict=True):
        np.testing.assert_array_equal(own["user"], other["user"])
    (test,) = found.columns("test", 0, PART)
    np.testing.assert_array_equal(test["user"], world.draw(6, 1, 0)["user"])
    (some,) = found.columns("train", PART + 10, PART + 30)
    np.testing.assert_array_equal(some["item"], parts[1]["item"][10:30])
    across = list(found.columns("train", PART - 5, PART + 5))
    assert [len(each["label"]) for each in across] == [5, 5]


def sizes():
    return {name: value for name, value in SMALL.items() if name != "events"}


def test_tfds_can_write_it_too(tmp_path):
    found = ClicksLarge(events=20, test_events=10, data_dir=tmp_path, **sizes())
    (drawn,) = found.columns("test", 0, 10)
    rows = list(found._generate_examples("test"))
    assert [number for number, _ in rows] == list(range(10))
    assert [row["user"] for _, row in rows] == drawn["user"].tolist()


def config(**args):
    return DataConfig(dataset=OWN, builder_args=args)


def test_the_newest_version_is_the_day(tmp_path):
    assert newest_version(config(day=17), tmp_path) == "1.1.17"
    begin = datetime.now(UTC).date() - timedelta(days=3)
    # The date may change during the test.
    assert newest_version(config(since=begin.isoformat()), tmp_path) in {"1.1.3", "1.1.4"}
    named = config(since=begin.isoformat()).model_copy(update={"version": "1.1.2"})
    assert datasets.builder(named, tmp_path).day == 2


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({"users": -1}, "users: -1 is not allowed; it must be a whole number from 1"),
        ({"items": 0}, "items: 0 is not allowed"),
        ({"events": 1.5}, "events: 1.5 is not allowed"),
        ({"test_events": -1}, "test_events: -1 is not allowed"),
        ({"new_items": 1_000_001}, "new_items: 1000001 is not allowed"),
        ({"zipf": 3}, "zipf: 3 is not allowed; it must be a number from 0 to 2"),
        ({"zipf": "1"}, "zipf: '1' is not allowed"),
        ({"segments": 0}, "segments: 0 is not allowed; it must be a whole number from 1"),
        ({"explained": 1.1}, "explained: 1.1 is not allowed; it must be a number from 0 to 1"),
        ({"drift": -0.1}, "drift: -0.1 is not allowed; it must be a number from 0 to 1"),
        ({"day": 10_000}, "day: 10000 is not allowed; it must be a whole number from 0 to 9999"),
        ({"days": 2}, "days: 2 is not allowed; it must be a whole number from 1 to 1"),
        ({"since": "monday"}, "since: 'monday' is not a date; write it as 2026-11-23"),
        ({"since": "2999-01-01"}, "since: '2999-01-01' is not allowed; it must be a date from"),
    ],
)
def test_what_is_out_of_range_is_refused(tmp_path, args, line):
    with pytest.raises(ConfigError) as caught:
        datasets.builder(config(**args), tmp_path)
    assert str(caught.value).startswith(f"data.dataset: {OWN}: ValueError: {line}")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        *((config().model_copy(update={"version": version}),
           r"^data\.version: .*(names no day|the last day)")
          for version in ("1.1", "1.1.", "1.0.1", "1.1.x", "1.1.10000")),
        (config(usres=1), r"^data\.builder_args: .*'usres' is not an arg"),
        (DataConfig(dataset="clicks_large"),
         r"^data\.dataset: clicks_large moved to the examples"),
    ],
)  # fmt: skip
def test_another_version_argument_or_name_is_refused(tmp_path, given, line):
    with pytest.raises(ConfigError, match=line):
        datasets.builder(given, tmp_path)


def test_its_configuration_is_valid_and_names_the_builder(tmp_path):
    found = load_config(FOLDER / "clicks_large.yaml")
    assert found.name == "clicks_large"
    made = datasets.builder(found.data, tmp_path)
    assert type(made).__name__ == "ClicksLarge"
    assert made.clickstream.users == 10_000_000


def test_a_run_finds_it_by_code(tmp_path):
    """Run as a user does: the example's folder is given with `--code`, and nothing is installed."""
    truth = {"users": 50, "items": 30, "new_users": 2, "new_items": 1, "events": 200}
    words = [
        *("prepare", str(FOLDER / "clicks_large.yaml"), "--code", str(FOLDER)),
        *("--workdir", str(tmp_path / "runs"), "--json", "--set", "data.validation=0"),
        *("--set", f"data.builder_args={json.dumps(truth | {'test_events': 50})}"),
    ]
    command = [sys.executable, "-m", "flotilla.pipelines.cli", *words]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    dataset = json.loads(made.stdout.splitlines()[-1])["artifacts"]["dataset"]
    splits = storage.read_manifest(dataset).fields["splits"]
    assert {name: each["examples"] for name, each in splits.items()} == {"train": 200, "test": 50}
