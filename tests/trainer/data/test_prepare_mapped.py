"""Datasets whose examples a function of the user's makes: with `data.map`."""

import pytest

from trainer.data.builders import builder_source
from trainer.data.spec import DatasetSpec
from trainer.errors import UserError

HERE = "tests.trainer.data.examples.mapping"


def test_texts_of_tfds_become_sequences(prepared, contents):
    dataset = prepared("Pictures", map=f"{HERE}:letters", shapes={"letters": (0,)})
    spec = DatasetSpec.from_manifest(dataset.manifest)
    assert spec.inputs == ("letters",)
    assert spec.features["label"].labels == ("cat", "dog", "eel")
    found = contents(dataset, "test")
    for row, length in zip(found["letters"], found["letters_length"], strict=True):
        text = "".join(map(chr, row[:length]))
        assert text.startswith("example ")
        assert text.endswith(" äß")
        assert not row[length:].any()


def test_half_of_the_examples(prepared):
    spec = DatasetSpec.from_manifest(prepared("Small", map=f"{HERE}:odd_ones_left_out").manifest)
    assert sum(map(spec.examples, ("train", "validation", "test"))) == 25


def test_every_feature_reaches_the_function(prepared, contents):
    dataset = prepared("Everything", map=f"{HERE}:all_of_it")
    found = contents(dataset, "test")
    assert (found["count"] == 15).all()
    assert found["image"].shape[1:] == (4, 5, 3)


def test_too_few_are_left_for_the_shards(prepared):
    with pytest.raises(UserError, match=r"data\.shards: 30"):
        prepared("Small", map=f"{HERE}:odd_ones_left_out", shards=30)


@pytest.mark.slow
def test_other_processes_call_the_function_as_well(prepared, contents, monkeypatch):
    options = {"map": f"{HERE}:letters", "shapes": {"letters": (0,)}}
    alone = prepared("Pictures", **options)
    monkeypatch.setattr(builder_source, "PART_BYTES", 4000)
    several = prepared("Pictures", **options, runner={"processes": 2}, seed=1)
    first, second = contents(alone, "test"), contents(several, "test")
    for name, values in first.items():
        assert sorted(map(str, values.tolist())) == sorted(map(str, second[name].tolist()))


def test_an_error_of_the_function_names_example_and_line(prepared):
    with pytest.raises(UserError) as error:
        prepared("Small", map=f"{HERE}:divides")
    assert "ZeroDivisionError: division by zero" in str(error.value)
    assert "mapping.py:" in str(error.value)
    assert "for example" in str(error.value)
