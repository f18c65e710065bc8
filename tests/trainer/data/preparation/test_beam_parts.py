"""Parts that Apache Beam maps make the same dataset; a part that fails is one line."""

import pickle

import pytest

from trainer import storage
from trainer.config.data import DataConfig, RunnerConfig
from trainer.data.preparation.beam_parts import PartMapper
from trainer.data.prepare import prepare
from trainer.errors import UserError

BEAM = {"name": "beam"}


def test_by_beam_the_same_bytes_are_made_under_the_same_key(prepared, source, tmp_path):
    alone = prepared(source)
    storage.delete(alone.uri)
    by_beam = prepared(source, runner=BEAM)
    assert by_beam.uri == alone.uri
    assert by_beam.manifest.same_content(alone.manifest)
    assert not list((tmp_path / "root" / "preparing").rglob("*.records"))


def test_a_part_that_fails_is_one_line_and_what_was_finished_is_kept(prepared, source, tmp_path):
    source.breaks = 3
    with pytest.raises(UserError) as caught:
        prepared(source, runner=BEAM)
    assert str(caught.value) == "part 3 is broken"
    (kept,) = (tmp_path / "root" / "preparing").iterdir()
    assert sorted(place.name for place in kept.iterdir()) == ["000000", "000001", "000002"]
    source.breaks = -1
    prepared(source, runner=BEAM)
    assert (source.seen / "1").read_text() == "read\n"


def test_a_worker_publishes_its_part_or_why_it_has_none(source, tmp_path):
    source.breaks = 3
    source.fetch()
    uri = storage.uri_of(tmp_path / "parts")
    mapper = pickle.loads(pickle.dumps(PartMapper(pickle.dumps(source), uri, 10)))
    assert [mapper(part) for part in source.parts()[:2]] == [0, 1]
    with pytest.raises(UserError, match="part 3 is broken"):
        mapper(source.parts()[3])
    assert [m.fields for _, m in storage.published(uri, "failed part")] == [
        {"message": "part 3 is broken"}
    ]
    # A runner tries again.
    with pytest.raises(UserError, match="part 3 is broken"):
        mapper(source.parts()[3])
    assert mapper(source.parts()[1]) == 1


@pytest.mark.slow
# Of protobuf, where TFDS reads what it has prepared.
@pytest.mark.filterwarnings(r"ignore:label\(\) is deprecated:DeprecationWarning")
def test_a_builder_that_uses_beam_is_run_by_it(root, scratch, contents):
    config = DataConfig(dataset="tests.trainer.data.made_builders:ByBeam", shards=2, runner=BEAM)
    dataset = prepare(config, root, scratch)
    found = contents(dataset, "test")
    assert sorted(found["number"].tolist()) == list(range(40, 50))


@pytest.mark.filterwarnings(r"ignore:label\(\) is deprecated:DeprecationWarning")
def test_examples_of_a_function_are_mapped_by_beam(root, scratch):
    config = DataConfig(
        dataset="tests.trainer.data.made_builders:Small",
        map="tests.trainer.data.examples.mapping:odd_ones_left_out",
        shards=2,
    )
    alone = prepare(config, root, scratch)
    storage.delete(alone.uri)
    by_beam = prepare(config.model_copy(update={"runner": RunnerConfig(**BEAM)}), root, scratch)
    assert by_beam.uri == alone.uri
    assert by_beam.manifest.same_content(alone.manifest)
