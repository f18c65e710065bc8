"""Tests the data of nightly training runs: new, late, repeated and changed data."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flotilla.trainer import storage
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.data.listing import Listing, SourceFile, select_spans
from flotilla.trainer.promotion import registry
from flotilla.trainer.promotion import training_data as trained
from flotilla.trainer.runtime import user_code
from flotilla.trainer.storage import Corrupt
from tests.trainer.promotion.test_registry import exported

NIGHTS, KEPT = 1000, 60


def as_listing(content):
    return Listing(
        "gs://b",
        tuple(
            SourceFile("gs://b", f"s-{span}.csv", 9, f"{span}/{tag}", span=str(span))
            for span, tag in sorted(content.items())
        ),
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_of_a_thousand_nights_no_span_is_trained_twice_or_missed(seed):
    draw = random.Random(seed)
    content: dict[int, int] = {}
    pending, late = set[int](), dict[int, int]()
    finished, lineages, words = set[str](), list[dict[str, Any]](), Counter[str]()
    contents, promoted = set[tuple[int, int]](), Counter[tuple[int, int]]()
    for night in range(NIGHTS):
        arrived = {span for span, at in late.items() if at <= night}
        if draw.random() < 0.6:
            (late.__setitem__(night, night + draw.randrange(1, 9)) if draw.random() < 0.2
             else arrived.add(night))  # fmt: skip
        changed = {span for span in content if draw.random() < 0.3 / KEPT}
        for span in arrived | changed:
            late.pop(span, None)
            content[span] = content.get(span, 0) + 1
        pending |= arrived | changed
        last = night == NIGHTS - 1
        for span in [each for each in sorted(content)[:-KEPT] if each not in pending]:
            del content[span]
        before = trained.read_lineage_data(reversed(lineages))
        taken = (
            select_spans(as_listing(content), "since_champion", before.spans) if content else None
        )
        if taken is None:
            continue
        version = taken.digest if taken.spans else before.version
        assert {int(span) for span in taken.spans} == pending
        if version in finished:
            words["unchanged"] += 1
            assert not (arrived | changed)
            continue
        word = "promoted" if last else draw.choices(["promoted", "refused", "killed"], [8, 1, 1])[0]
        words[word] += 1
        if word != "killed":
            finished.add(version)
        if word == "promoted":
            lineages.append({"data_version": version, "spans": dict(taken.spans)})
            promoted.update((span, content[span]) for span in pending)
            contents |= {(span, content[span]) for span in pending}
            pending.clear()
    assert not pending
    assert set(promoted.values()) == {1}
    assert {span for span, _ in promoted} >= set(content)
    assert all((span, tag) in promoted for span, tag in content.items())
    assert min(words[each] for each in ("unchanged", "promoted", "refused", "killed")) > 20


NAME = "things"
DATA = {"source": "s.csv", "version": "0" * 32}


@pytest.fixture
def root(tmp_path):
    return storage.uri_of(tmp_path / "root")


def crown(root, folder, version, spans):
    lineage = {"data_version": version, "spans": spans}
    model = exported(folder, version)
    made = registry.register(root, NAME, model, lineage=lineage, scratch=folder)
    registry.promote(root, NAME, made.number, after=registry.newest(root, NAME), by="me")


def test_a_champion_that_was_rolled_back_was_trained_on_nothing(root, tmp_path):
    assert trained.read_champion_data(root, NAME) == trained.TrainedData(spans={})
    crown(root, tmp_path, "a", {"1": "x", "2": "x"})
    crown(root, tmp_path, "b", {"2": "y"})
    assert trained.read_champion_data(root, NAME).spans == {"1": "x", "2": "y"}
    registry.rollback(root, NAME, by="me")
    before = trained.read_champion_data(root, NAME)
    assert (before.version, before.spans) == ("a", {"1": "x", "2": "x"})
    crown(root, tmp_path, "c", {"3": "z"})
    assert trained.read_champion_data(root, NAME).spans == {"1": "x", "2": "x", "3": "z"}


def test_a_version_that_is_removed_between_two_reads_counts(root, tmp_path, monkeypatch):
    crown(root, tmp_path, "a", {"1": "x"})
    crown(root, tmp_path, "b", {"2": "y"})
    first = registry.version(root, NAME, 1)

    def then_remove(read):
        def call(*arguments):
            found = read(*arguments)
            if storage.is_published(first.uri):
                registry.retire(registry.home(root, NAME), 1, first.manifest.fields["lineage"])
                storage.delete(first.uri)
            return found

        return call

    for name in ("versions", "read_retired"):
        monkeypatch.setattr(registry, name, then_remove(getattr(registry, name)))
    assert trained.read_champion_data(root, NAME).spans == {"1": "x", "2": "y"}
    assert not storage.is_published(first.uri)


def configured(**training):
    data = {**DATA, "source": "s-{SPAN}.csv"}
    training = {"warm_start": "champion", **training}
    return parse_config({"name": NAME, "data": data, "training": training})


def test_what_a_run_has_decided_needs_no_second_run(root):
    config = configured()
    trained.begin(config, root, "first")
    # A killed run leaves no decision.
    assert trained.find_finished(config, root) == ""
    trained.end(root, "first", "refused")
    assert trained.find_finished(config, root) == "first"
    assert trained.find_finished(configured(when_unchanged="train"), root) == "first"
    assert trained.find_finished(configured(steps=7), root) == ""
    # A run whose configuration was not recorded leaves no mark.
    trained.end(root, "second", "refused")


@pytest.mark.parametrize(
    "named",
    [
        {"data": {**DATA, "map": "mine:it"}},
        {"model": {"name": "mine:it"}},
        {"training": {"strategy": "mine:it"}},
        {"task": {"name": "mine:it"}},
        {"task": {"loss": "mine:it"}},
        {"task": {"metrics": ["mine:it"]}},
        {"task": {"outputs": {"y": {"loss": "mine:it"}}}},
        {"task": {"outputs": {"y": {"name": "mine:it"}}}},
        {"task": {"outputs": {"y": {"metrics": ["mine:it"]}}}},
    ],
)
def test_own_code_that_was_written_again_is_news(named, root, tmp_path, monkeypatch):
    monkeypatch.setenv(user_code.FOLDER_VARIABLE, str(tmp_path))
    (tmp_path / "mine.py").write_text("def it(): return 1\n")
    config = parse_config({"name": NAME, "data": DATA, **named})
    trained.begin(config, root, "first")
    trained.end(root, "first", "refused")
    assert trained.find_finished(config, root) == "first"
    (tmp_path / "mine.py").write_text("def it(): return 2\n")
    assert trained.find_finished(config, root) == ""


def test_a_mark_that_is_damaged_is_one_line(root):
    config = configured()
    trained.begin(config, root, "first")
    trained.end(root, "first", "promoted")
    (mark,) = (storage.local_path(root) or Path()).rglob("finished/*.json")
    mark.write_text("[")
    with pytest.raises(Corrupt, match="is damaged; delete it, and start the run again"):
        trained.find_finished(config, root)
