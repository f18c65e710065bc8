"""From a dataset's features to what the model has to take in."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.models.spec import InputSpec


@dataclass(frozen=True)
class Column:
    shape: tuple[int, ...]
    dtype: str


FEATURES = {
    "image": Column((28, 28, 1), "uint8"),
    "age": Column((), "float32"),
    "label": Column((), "int64"),
}


def test_one_feature_is_a_plain_tensor():
    spec = InputSpec.of(FEATURES, ["image"], (10,))
    assert spec == InputSpec(shape=(28, 28, 1), dtype="uint8", output_shape=(10,))


def test_several_features_keep_their_names():
    spec = InputSpec.of(FEATURES, ("image", "age"), (2,))
    assert spec.shape == {"image": (28, 28, 1), "age": ()}
    assert spec.dtype == {"image": "uint8", "age": "float32"}


def test_symbol_of_one_feature_has_a_batch_axis():
    symbol = InputSpec.of(FEATURES, ["image"], (10,)).symbols()
    assert symbol.shape == (None, 28, 28, 1)
    assert symbol.dtype == "uint8"


def test_symbols_of_several_features_carry_their_names():
    symbols = InputSpec.of(FEATURES, ["age", "image"], 2).symbols()
    assert {name: symbol.shape for name, symbol in symbols.items()} == {
        "age": (None,),
        "image": (None, 28, 28, 1),
    }
    assert [symbol.name for symbol in symbols.values()] == ["age", "image"]
