"""Tests the pinned inputs of a run: the champion at its start and the version of its dataset."""

import json

import pytest

from flotilla.components import prepare_data
from flotilla.components.records import run_store
from flotilla.trainer import events, storage
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.data import listing
from flotilla.trainer.events import FromScratch
from flotilla.trainer.promotion import registry
from flotilla.trainer.promotion import training_data as trained
from flotilla.trainer.runtime.errors import ConfigError, UserError
from tests.trainer.promotion.test_registry import exported

NAME = "digits"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(run_store.RUN_FOLDER, str(tmp_path / "run"))
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    return tmp_path / "run"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.delenv(run_store.RUN_FOLDER, raising=False)
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))


@pytest.fixture
def root(tmp_path):
    return storage.uri_of(tmp_path / "root")


def crowned(root, folder, text, checkpoint=None):
    folder.mkdir(exist_ok=True)
    source = folder / f"weights-{text}"
    source.mkdir()
    if checkpoint is None:
        checkpoint = storage.uri_of(folder / f"checkpoint-{text}")
        storage.publish(source, checkpoint, kind="checkpoint", fields={"global_step": 5})
    lineage = {"checkpoint": checkpoint}
    made = registry.register(root, NAME, exported(folder, text), lineage=lineage, scratch=folder)
    registry.promote(root, NAME, made.number, after=registry.newest(root, NAME), by="me")
    return checkpoint


def warm(word, root):
    config = parse_config({"name": NAME, "training": {"warm_start": word}})
    return prepare_data.add_champion(config, root).training.warm_start


def emitted(tmp_path):
    return list(events.read(tmp_path / "events.jsonl"))


@pytest.mark.parametrize(
    ("output", "root"),
    [
        ("gs://b/k/p/123/prepare-data/7/configuration", "gs://b/k/flotilla"),
        (
            "minio://mlpipeline/v2/p/123/prepare-data/7/configuration?endpoint=a:1&region=x",
            "minio://mlpipeline/v2/flotilla?endpoint=a:1&region=x",
        ),
    ],
)
def test_without_a_root_it_is_below_the_pipeline_root(output, root):
    # The bucket does not exist, so this test also shows that no request is sent.
    assert run_store.find_root("", output, "123") == root


@pytest.mark.usefixtures("folder")
def test_a_part_of_the_champion_stays_a_part(root, tmp_path):
    part = {"from": "champion", "exclude": ["out/*"]}
    assert warm(part, root) == ""
    checkpoint = crowned(root, tmp_path / "made", "one")
    (tmp_path / "run" / run_store.PINNED).unlink()
    assert warm(part, root) == {"from": checkpoint, "exclude": ["out/*"]}


@pytest.mark.usefixtures("folder")
def test_it_stays_when_the_run_is_resumed_after_another_promotion(root, tmp_path):
    first = crowned(root, tmp_path / "made", "one")
    assert warm("champion", root) == first
    assert emitted(tmp_path) == []
    second = crowned(root, tmp_path / "made", "two")
    storage.delete(first)
    assert warm("champion", root) == first
    assert first != second


def test_the_next_run_takes_the_next_champion(root, tmp_path, monkeypatch):
    for number, text in enumerate(["one", "two"]):
        checkpoint = crowned(root, tmp_path / "made", text)
        monkeypatch.setenv(run_store.RUN_FOLDER, str(tmp_path / f"run-{number}"))
        assert warm("champion", root) == checkpoint


@pytest.mark.usefixtures("folder")
def test_without_a_champion_it_begins_from_scratch_and_says_so(root, tmp_path):
    assert warm("champion", root) == ""
    (event,) = emitted(tmp_path)
    assert isinstance(event, FromScratch)
    assert event.reason == f"digits has no champion yet below {root}"
    crowned(root, tmp_path / "made", "one")
    assert warm("champion", root) == ""


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("word", ["", "gs://bucket/run/checkpoints/step-00000005"])
def test_what_names_no_champion_stays_as_it_is(root, word):
    assert warm(word, root) == word


@pytest.mark.usefixtures("folder")
def test_a_champion_whose_checkpoint_is_gone_is_one_line(root, tmp_path):
    checkpoint = crowned(root, tmp_path / "made", "one")
    storage.delete(checkpoint)
    with pytest.raises(UserError) as caught:
        warm("champion", root)
    assert str(caught.value) == (
        f"training.warm_start: the checkpoint {checkpoint} of the champion of digits (version 1) "
        "no longer exists; set the URI of another checkpoint, or leave the key empty"
    )


@pytest.mark.usefixtures("folder")
def test_a_champion_that_names_no_checkpoint_is_one_line(root, tmp_path):
    crowned(root, tmp_path / "made", "one", checkpoint="")
    with pytest.raises(UserError, match=r"champion of digits \(version \d+\) has no checkpoint"):
        warm("champion", root)


@pytest.mark.usefixtures("elsewhere")
def test_a_container_looks_it_up_each_time_and_pins_nothing(root, tmp_path):
    first = crowned(root, tmp_path / "made", "one")
    assert warm("champion", root) == first
    second = crowned(root, tmp_path / "made", "two")
    assert warm("champion", root) == second != first
    assert not list(tmp_path.rglob(run_store.PINNED))


def test_what_is_pinned_is_read_later(folder):
    assert run_store.read_pinned("a") == ""
    run_store.pin("a", "1")
    run_store.pin("b", "2")
    run_store.pin("a", "3")
    assert (run_store.read_pinned("a"), run_store.read_pinned("b")) == ("3", "2")
    assert json.loads((folder / run_store.PINNED).read_text()) == {"a": "3", "b": "2"}


@pytest.mark.parametrize("damage", ["", "{", "[1]"])
def test_what_cannot_be_read_is_not_pinned(folder, damage):
    folder.mkdir()
    (folder / run_store.PINNED).write_text(damage)
    assert run_store.pin_once("a", lambda: "1") == "1"
    assert run_store.pin_once("a", lambda: "2") == "1"


def test_a_folder_that_cannot_be_written_is_one_line(folder):
    folder.write_text("a file")
    with pytest.raises(UserError, match=r"^cannot write "):
        run_store.pin("a", "1")


class Nights:
    """Data files that arrive over time, and a nightly run whose model may become the champion."""

    def __init__(self, tmp_path, root, monkeypatch):
        self.files, self.root, self._set = tmp_path / "in", root, monkeypatch.setenv
        self._made, self._number = tmp_path / "made", 0
        self.files.mkdir()

    def come(self, *spans, text="rows"):
        for span in spans:
            (self.files / f"s-{span}.csv").write_text(f"{span} {text}")

    def config(self, **keys):
        data = {"source": str(self.files / "s-{SPAN}.csv"), "spans": "since_champion", **keys}
        return parse_config({"name": NAME, "data": data})

    def begin(self):
        """Start the next night's run; return its spans and the earlier run with the same data."""
        self._number += 1
        self._set(run_store.RUN_FOLDER, str(self._made / f"run-{self._number}"))
        return self.resume()

    def resume(self):
        config = prepare_data.add_listing(self.config(), self.root)
        trained.begin(config, self.root, f"run-{self._number}")
        earlier = prepare_data.find_finished_run(config, self.root)
        return list(listing.list_spans(self.root, config.data.version)), earlier

    def finish(self, word="promoted"):
        config = prepare_data.add_listing(self.config(), self.root)
        trained.end(self.root, f"run-{self._number}", word)
        version = config.data.version
        self._made.mkdir(exist_ok=True)
        if word == "promoted":
            model = exported(self._made, f"w{self._number}")
            lineage = {"data_version": version, "spans": listing.list_spans(self.root, version)}
            made = registry.register(self.root, NAME, model, lineage=lineage, scratch=self._made)
            after = registry.newest(self.root, NAME)
            registry.promote(self.root, NAME, made.number, after=after, by="me")


@pytest.fixture
def nights(tmp_path, root, folder, monkeypatch):  # noqa: ARG001
    return Nights(tmp_path, root, monkeypatch)


def test_each_night_trains_on_what_is_new(nights):
    nights.come(1, 2)
    assert nights.begin() == (["1", "2"], "")
    nights.finish()
    # No file has changed since the champion was trained.
    assert nights.begin() == (["1", "2"], "run-1")
    nights.come(4)
    assert nights.begin() == (["4"], "")
    nights.finish("refused")
    assert nights.begin() == (["4"], "run-3")
    nights.come(3)
    nights.come(1, text="other rows")
    assert nights.begin() == (["1", "3", "4"], "")
    nights.finish()
    assert nights.begin() == (["1", "3", "4"], "run-5")
    (nights.files / "s-3.csv").unlink()
    assert nights.begin() == (["1", "3", "4"], "run-5")


def test_a_run_that_is_resumed_keeps_its_files_and_its_word(nights):
    nights.come(1)
    assert nights.begin() == (["1"], "")
    nights.finish()
    nights.come(2)
    assert nights.resume() == (["1"], "")
    assert nights.begin() == (["2"], "")


def test_a_run_that_is_resumed_takes_no_other_source(nights, monkeypatch):
    nights.come(1)
    with pytest.raises(UserError, match=r"no file|nothing at"):
        prepare_data.add_listing(nights.config(source=str(nights.files / "t.csv")), nights.root)
    nights.resume()
    for other in ({"source": str(nights.files / "s-1.csv")}, {"spans": "all"}):
        with pytest.raises(
            ConfigError, match=r"the files that it started with: .*; start a new run to use "
        ):
            prepare_data.add_listing(nights.config(**other), nights.root)
    assert nights.resume() == (["1"], "")
    monkeypatch.chdir(nights.files)
    prepare_data.add_listing(nights.config(source="s-{SPAN}.csv"), nights.root)


def test_another_configuration_is_something_new(nights):
    nights.come(1)
    nights.begin()
    nights.finish()
    config = prepare_data.add_listing(nights.config(), nights.root)
    for changed in ({"steps": 7}, {"when_unchanged": "train"}):
        other = config.model_copy(update={"training": config.training.model_copy(update=changed)})
        assert prepare_data.find_finished_run(other, nights.root) == ""


def test_files_that_are_named_by_their_digest_are_not_listed(nights):
    named = nights.config(version="0" * 32)
    assert prepare_data.add_listing(named, nights.root) == named
