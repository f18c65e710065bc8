"""What `training.warm_start` says, and how it comes back as the value of the key."""

from __future__ import annotations

import pytest

from trainer.config.initial_weights import InitialWeights, initial_weights


@pytest.mark.parametrize(
    ("value", "source"),
    [
        ("", ""),
        ("champion", "champion"),
        ("gs://bucket/run/checkpoints/step-00000500/", "gs://bucket/run/checkpoints/step-00000500"),
        ("s3://bucket/model.keras", "s3://bucket/model.keras"),
        ("file:///models/a.keras", "file:///models/a.keras"),
    ],
)
def test_a_text_says_where_all_weights_are(value, source):
    found = initial_weights(value)
    assert found == InitialWeights(source=source)
    assert not found.is_partial
    assert found.value() == source


def test_the_path_of_a_keras_file_becomes_a_uri(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = (tmp_path / "models/a.keras").as_uri()
    assert initial_weights("models/a.keras").source == expected
    assert initial_weights({"from": "models/a.keras", "include": ["*"]}).source == expected


@pytest.mark.parametrize(
    ("include", "exclude"), [(["stem/*"], []), ([], ["logits/*"]), (["a/*", "b/*"], ["a/bias"])]
)
def test_a_mapping_names_a_part_of_them(include, exclude):
    value = {"from": "champion", "include": include, "exclude": exclude}
    found = initial_weights(value)
    assert found.is_partial
    assert (found.include, found.exclude) == (tuple(include), tuple(exclude))
    # What is empty is left out, and the value says the same again.
    assert found.value() == {name: each for name, each in value.items() if each}
    assert initial_weights(found.value()) == found


def test_a_mapping_without_globs_is_a_text():
    found = initial_weights({"from": "champion", "include": [], "exclude": []})
    assert not found.is_partial
    assert found.value() == "champion"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("champoin", "did you mean 'champion'"),
        ("runs/a", "neither champion nor the URI of a checkpoint"),
        ("gs://bucket/../a", ".."),
        ({"from": "champion", "inculde": []}, "no key 'inculde' in it; did you mean 'include'"),
        ({"from": "champion", "layers": []}, "(one of from, include, exclude)"),
        ({"exclude": ["logits/*"]}, "say where the weights are: {from: URI}"),
        ({"from": "", "exclude": ["logits/*"]}, "say where the weights are: {from: URI}"),
        ({"from": "champion", "exclude": "logits/*"}, 'exclude is "logits/*": write a list'),
        ({"from": "champion", "include": [""]}, 'include is [""]: write a list of globs'),
    ],
)
def test_what_is_wrong_is_said_in_one_line(value, words):
    with pytest.raises(ValueError, match=r".") as caught:
        initial_weights(value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
