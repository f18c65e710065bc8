"""Tests that `flotilla gc` removes only unused files of Flotilla, and lists all others as kept."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flotilla.pipelines.retention import make_plan, policy, removal
from flotilla.pipelines.retention.inventory import read
from flotilla.trainer import storage
from flotilla.trainer.storage.uri import split_names
from tests.pipelines.retention.roots import age, manifest, run_of, version_of


@pytest.fixture(params=["plain", "what?", "50%3F off, now (a)"])
def root(tmp_path, request):
    return tmp_path / request.param / "runs"


def plan_of(root):
    plan = make_plan(read(storage.uri_of(root), Path()), policy("30d", 1), datetime.now(UTC))
    return [each.path for each in plan.going], plan.remarks


def champion_in(root):
    """Write an old champion with its run, and an old run that is no longer needed."""
    data = manifest(root / "datasets" / "d", "dataset", 90)
    version_of(root, 1, 90, run_of(root, 1, 90, data))
    run_of(root, 2, 90, manifest(root / "datasets" / "e", "dataset", 90))
    return root


def test_what_a_champion_needs_stays_whatever_the_name_of_the_root(root):
    champion_in(root)
    gone, _ = plan_of(root)
    assert gone == ["digits-0002", "digits-0001/checkpoints/step-00000000", "datasets/e"]


@pytest.mark.parametrize(
    "uri",
    [
        "file:///a/what%3F/runs/datasets/d%20%25%3F",
        "s3://bucket/what%3F (a), b/runs/datasets/d %25%3F?endpoint=http://h/datasets/e",
        "gs://bucket/100%25/runs/datasets/d %25%3f",
        "/a/what?/runs/datasets/d %?",
    ],
)
def test_a_uri_is_decoded_once(uri):
    assert split_names(uri)[-2:] == ["datasets", "d %?"]


def test_one_above_is_found_in_a_file_uri_that_a_person_wrote():
    assert storage.parent_of("file:///a/what?/runs") == "file:///a/what?"


def foreign(root, name):
    """Write another user's folder whose file names are the same as those in a run."""
    at = root / name
    if name == "thesis":
        (at / "steps").mkdir(parents=True)
        (at / "steps" / "01_measure.txt").write_text("years")
        (at / "steps" / "02.json").write_text('{"began": 1.0, "step": "measure"}')
    elif name == "other-tool":
        at.mkdir()
        (at / "events.jsonl").write_text('{"event": "run_begin", "run_id": "another"}\n')
        (at / "lock").touch()
    elif name == "archive":
        # This is a copy of a run's published files.
        made = run_of(root, 3, 90, storage.uri_of(root / "datasets" / "d"))
        assert made
        (root / "digits-0003").rename(at)
    else:
        at.mkdir()
        (at / "sweep.json").write_text('{"method": "grid"}')
    age(at, 900)


@pytest.mark.parametrize("name", ["thesis", "other-tool", "archive", "grid"])
def test_a_folder_of_somebody_else_stays(tmp_path, name):
    root = champion_in(tmp_path / "root")
    foreign(root, name)
    gone, _ = plan_of(root)
    assert "digits-0002" in gone
    assert not [each for each in gone if each.startswith(name)]


@pytest.mark.parametrize("what", ["code", "datasets", "digits-0002/model"])
def test_a_published_directory_of_another_kind_stays(tmp_path, what):
    root = champion_in(tmp_path / "root")
    manifest(root / what / "mine", "weather", 900)
    age(root, 90)
    assert f"{what}/mine" not in plan_of(root)[0]


@pytest.mark.parametrize("number", ["²", "9" * 40, "000001x", "-1"])
def test_an_odd_number_of_a_version_is_no_version(tmp_path, number):
    root = champion_in(tmp_path / "root")
    manifest(root / "registry" / "models" / "digits" / "versions" / number, "model", 900)
    manifest(root / "registry" / "models" / "digits" / "promotions" / number, "promotion", 900)
    assert "digits-0001" not in plan_of(root)[0]


@pytest.mark.parametrize(
    ("record", "content"),
    [
        ("steps/train_model.json", b'{"step": "train_mo'),
        ("steps/train_model.json", b""),
        ("checkpoints/step-00000100/MANIFEST.json", b"\xff{"),
        ("checkpoints/step-00000100/MANIFEST.json", b'{"schema": 900}'),
    ],
)
def test_what_a_damaged_record_may_need_stays_and_the_record_is_named(tmp_path, record, content):
    root = champion_in(tmp_path / "root")
    damaged = root / "digits-0002" / record
    damaged.parent.mkdir(exist_ok=True)
    damaged.write_bytes(content)
    manifest(root / "datasets" / "only-named-there", "dataset", 90)
    age(root, 90)
    gone, remarks = plan_of(root)
    assert gone == []
    assert Path(record).parent.name in " ".join(remarks)


def test_listings_and_code_that_a_damaged_dataset_may_need_stay(tmp_path):
    root = champion_in(tmp_path / "root")
    manifest(root / "listings" / "l", "listing", 90)
    (root / "datasets" / "e" / "MANIFEST.json").write_text("{")
    gone, remarks = plan_of(root)
    assert gone == ["digits-0002", "digits-0001/checkpoints/step-00000000"]
    assert "datasets/e" in " ".join(remarks)


@pytest.mark.parametrize("began", [1e300, -1e300, 1e18])
def test_a_time_that_is_none_ends_nothing(tmp_path, began):
    root = champion_in(tmp_path / "root")
    (root / "digits-0002" / "steps").mkdir()
    record = {"step": "train_model", "began": began}
    (root / "digits-0002" / "steps" / "train_model.json").write_text(json.dumps(record))
    assert "digits-0002" not in plan_of(root)[0]


def test_a_damaged_part_is_named_and_the_others_go(tmp_path, caplog):
    root = tmp_path / "root"
    for name in ("a", "b", "c", "d", "e"):
        manifest(root / "preparing" / name / "part-1", "part", 90)
    parts = {each: root / "preparing" / each / "part-1" / "MANIFEST.json" for each in "abcde"}
    parts["a"].write_text(parts["a"].read_text().replace('"created": "2', '"created": "soon 2'))
    parts["b"].write_text("{")
    parts["c"].write_text(parts["c"].read_text().replace('"part"', '"weather"'))
    (root / "preparing" / "d" / "notes").mkdir()
    removed = removal.collect(storage.uri_of(root))
    assert [storage.name_of(each) for each in removed] == ["e"]
    assert sorted(each.name for each in (root / "preparing").iterdir()) == ["a", "b", "c", "d"]
    assert "preparing/a" in caplog.text
    assert "preparing/b" in caplog.text
