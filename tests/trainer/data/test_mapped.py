"""Tests examples from a user's map function, and results that cannot be stored."""

import pickle
import sys

import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.blocks import complete, encode_blocks, parse_blocks
from flotilla.trainer.data.builders import batches, datasets
from flotilla.trainer.data.builders.download import download
from flotilla.trainer.data.columns import make_columns, make_table
from flotilla.trainer.data.features import Selection, select
from flotilla.trainer.data.files.file_source import FileSource
from flotilla.trainer.data.images import encode_png as png
from flotilla.trainer.data.mapped import (
    MappedSource,
    UnsuitableError,
    convert_value,
    get_dtype,
    infer_leaf,
    make_example,
    make_value,
    source_config,
    store_value,
)
from flotilla.trainer.data.prepare import dataset_key
from flotilla.trainer.data.source import Batch, Part, Source
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.runtime.errors import ConfigError, UserError
from tests.trainer.data.files.sources import listed

EXAMPLES, PARTS, BATCH = 320, 2, 50
HERE = "tests.trainer.data.mapping"


class Numbers(Source):
    def __init__(self, examples=EXAMPLES):
        self.name = "data.source: numbers.csv"
        self.identity = {"listing": "abc"}
        self.examples = examples

    def select(self):
        specs = {
            "number": FeatureSpec(shape=(), dtype="int64", stored="int"),
            "text": FeatureSpec(shape=(), dtype="string", stored="bytes"),
            "label": FeatureSpec(
                shape=(), dtype="int64", stored="int", num_classes=2, labels=("even", "odd")
            ),
            "photo": FeatureSpec(shape=(2, 2, 1), dtype="uint8", stored="image"),
        }
        return Selection(inputs=(), targets=(), specs=specs, connectors={}, fits={})

    def fetch(self):
        pass

    def parts(self):
        return [Part(number=number, origin="train") for number in range(PARTS)]

    def read(self, part, selection):
        del selection
        share = self.examples // PARTS
        for start in range(0, share, BATCH):
            numbers = np.arange(start, min(start + BATCH, share)) + part.number * share
            texts = np.array([" ".join(["äh"] * (n % 4 + 1)).encode() for n in numbers], object)
            photos = [png(np.full((2, 2, 1), n % 256, np.uint8)) for n in numbers]
            columns = {"number": numbers, "text": texts, "label": numbers % 2, "photo": photos}
            yield Batch(columns=columns, splits=(numbers % 3).astype(np.int8))


def mapped(function, examples=EXAMPLES, **options):
    config = DataConfig(source="numbers.csv", map=f"{HERE}:{function}", **options)
    return MappedSource(Numbers(examples), config)


def everything(source):
    """Return the selection and all examples, as read from records, with their splits."""
    selection = source.select()
    # Load the source as another process would.
    source = pickle.loads(pickle.dumps(source))
    found, splits = [], []
    for part in source.parts():
        for batch in source.read(part, selection):
            table = make_table(selection.specs, make_columns(selection.specs, batch.columns))
            blocks = list(encode_blocks(selection.specs, table, 3))
            rows = parse_blocks(selection.specs, tf.constant(blocks))
            values = complete(selection.specs, rows)
            splits += batch.splits.tolist()
            found += [
                {name: each[row].numpy() for name, each in values.items()}
                for row in range(table.num_rows)
            ]
    return selection, found, splits


def refusal(function, **options):
    with pytest.raises(UserError) as caught:
        everything(mapped(function, **options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


NO_SHAPE = ("data.shapes: examples of data.map", "'tokens' (int64 of shape (None,))")
NO_BATCH = ("1 values of 'size' for 50 examples", "example 0 of part 0 (train)")
NO_IMAGE = ("data.image: the function of data.map returns images",)
FAILED = ("ZeroDivisionError", "mapping.py:", "for example 7 of part 0 (train)")
NO_TYPE = ("returns 'x' as a string for some rows and as a number for others", "7 of part 0")
LATER = "(example 140 of part 1 (train))"


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        ("tokens", {}, NO_SHAPE),
        ("nothing", {}, ("returns None for every row",)),
        ("too_few", {}, NO_BATCH),
        ("picture", {"types": {"x": "image"}}, NO_IMAGE),
        ("picture", {"types": {"z": "int"}}, ("data.types: 'z' is neither in",)),
        ("divides", {}, FAILED),
        # The first examples have to agree, and later ones have to be like them.
        ("turns_into_text_soon", {}, NO_TYPE),
        ("turns_into_text", {}, ("'x' as string, but as float32 for the first examples", LATER)),
        ("grows", {}, ("'x' with shape (3,), but with shape (2,) for the first examples;", LATER)),
        ("loses_one", {}, ("but returned no 'y'", LATER)),
        ("a_list", {}, ("returns a value of type list, not a dict of values by name",)),
        ("no_value", {}, ("returns None for 'x'; return NaN",)),
    ],
)
def test_what_is_no_dataset_is_one_line(function, options, words):
    message = refusal(function, **options)
    assert not [word for word in words if word not in message]


@pytest.mark.parametrize(
    ("function", "options", "name", "dtype", "classes"),
    [
        ("whole_then_broken", {}, "x", "float32", 0),
        ("odd_ones_left_out", {"label": ["x"], "types": {"x": "int"}}, "x", "int64", 0),
        ("loses_one", {"examples": 300, "types": {"y": "class"}}, "y", "int64", 3),
    ],
)
def test_types_are_inferred_or_those_that_are_said(function, options, name, dtype, classes):
    selection, _, _ = everything(mapped(function, **options))
    assert (selection.specs[name].dtype, selection.specs[name].num_classes) == (dtype, classes)


def test_one_example_at_a_time():
    selection, found, splits = everything(mapped("tokens", shapes={"tokens": (0,)}))
    assert selection.inputs == ("tokens", "first")
    assert selection.specs["tokens"].shape == (None,)
    assert selection.specs["label"].labels == ("even", "odd")
    assert [each["tokens_length"] for each in found] == [n % 4 + 1 for n in range(EXAMPLES)]
    assert found[3]["tokens"].tolist() == [2, 2, 2, 2]
    assert {each["first"] for each in found} == {"äh".encode()}
    assert splits == [n % 3 for n in range(EXAMPLES)]


CUT = {"shapes": {"tokens": (2,)}}


@pytest.mark.parametrize(
    ("function", "options", "name", "values"),
    [
        ("tokens", CUT, "tokens", [[2, 0], [2, 2], [2, 2]]),
        ("odd_ones_left_out", {}, "x", [0.5, 1.5, 2.5]),
        ("tokens_of_all", {}, "size", [2, 5, 8, 11]),
        ("names_of_classes", {}, "label", [0, 1, 2, 0]),
    ],
)
def test_results_are_stored(function, options, name, values):
    selection, found, splits = everything(mapped(function, **options))
    assert [each[name].tolist() for each in found[: len(values)]] == values
    taken = range(1, EXAMPLES, 2) if function == "odd_ones_left_out" else range(EXAMPLES)
    assert splits == [n % 3 for n in taken]
    if function == "names_of_classes":
        assert selection.specs["label"].labels == ("class 0", "class 1", "class 2")


def test_empty_lists_have_the_type_of_others():
    shapes = {"words": (0,), "names": (2,)}
    options = {"types": {"label": "class"}, "shapes": shapes, "label": ["label"]}
    selection, found, _ = everything(mapped("sets", **options))
    assert selection.specs["words"].dtype == "int64"
    assert selection.specs["label"].num_classes == 2
    assert [each["words_length"] for each in found[:4]] == [0, 1, 2, 0]
    assert [each["names"].tolist() for each in found[:3]] == [[b"", b""], [b"b", b""], [b"a", b"a"]]
    assert [each["label"].tolist() for each in found[:3]] == [[0, 0], [1, 0], [1, 1]]


@pytest.mark.parametrize(("options", "stored"), [({}, "raw"), ({"types": {"x": "image"}}, "image")])
def test_pictures(options, stored):
    size = {"size": [3, 4]} if options else {}
    selection, found, _ = everything(mapped("picture", examples=20, image=size, **options))
    assert selection.specs["x"].stored == stored
    assert found[7]["x"].tolist() == np.full((3, 4, 3), 7).tolist()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (f"{HERE}:tokenz", "has no function 'tokenz'; did you mean 'tokens'?"),
        (f"{HERE}:NUMBER", "NUMBER is of type int; give the name of a function"),
        (f"{HERE}", "is not a function; write package.module:function"),
        ("no_such_module:f", "cannot import no_such_module"),
    ],
)
def test_a_function_that_is_not_there(name, what):
    config = DataConfig(source="numbers.csv", map=name)
    with pytest.raises(ConfigError, match=r"data\.map: ") as caught:
        MappedSource(Numbers(), config).select()
    assert what in str(caught.value)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the user's folder, with a module that imports two others."""
    monkeypatch.setenv("FLOTILLA_USER_FOLDER", str(tmp_path))
    (tmp_path / "mine_a.py").write_text("import json\nimport mine_b\nfrom mine_c import f\n")
    (tmp_path / "mine_b.py").write_text("N = 1\n")
    package = tmp_path / "mine_c"
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import f\n")
    (package / "inner.py").write_text("def f(x): return x\n")
    yield tmp_path
    for name in [each for each in sys.modules if each.startswith("mine_")]:
        del sys.modules[name]


@pytest.mark.parametrize("changed", ["mine_a.py", "mine_b.py", "mine_c/inner.py"])
def test_a_change_of_the_function_makes_another_dataset(folder, changed):
    config = DataConfig(map="mine_a:f")
    before = dataset_key(config, {})
    assert before == dataset_key(config, {})
    (folder / "other.py").write_text("")
    assert before == dataset_key(config, {})
    path = folder / changed
    path.write_text(path.read_text() + "# other\n")
    assert dataset_key(config, {}) != before


def test_rows_of_files(tmp_path):
    rows = [f"n{'x' * (number % 5)},{number}" for number in range(60)]
    (tmp_path / "people.csv").write_text("\n".join(["name,age", *rows]) + "\n")
    config = DataConfig(
        source=str(tmp_path), map=f"{HERE}:of_rows", label=["old"], shapes={"name": (0,)}
    )
    files = FileSource(source_config(config), listed(tmp_path), tmp_path)
    selection, found, splits = everything(MappedSource(files, config))
    assert selection.inputs == ("name",)
    assert selection.specs["old"].dtype == "bool"
    assert len(found) == len(rows)
    assert set(splits) == {0, 1, 2}
    assert sum(int(each["old"]) for each in found) == 29


def test_an_error_names_the_file(tmp_path):
    (tmp_path / "people.csv").write_text("name,number,label\na,7,0\nb,8,1\n")
    config = DataConfig(source=str(tmp_path), map=f"{HERE}:divides")
    files = FileSource(source_config(config), listed(tmp_path), tmp_path)
    with pytest.raises(UserError, match=r"ZeroDivisionError.* for people\.csv, row 2"):
        MappedSource(files, config).select()


def test_examples_of_tfds(tmp_path):
    """TFDS examples are nested, vary in shape and contain images."""
    config = DataConfig(
        dataset="tests.trainer.data.made_builders:VariableImage", map=f"{HERE}:sides"
    )
    builder = datasets.builder(config, tmp_path)
    download("VariableImage", builder, "")
    selection = select(source_config(config), builder.info)
    examples = builder.info.splits["test"].num_examples
    part = Part(number=0, origin="test", where={"first": 0, "end": examples})
    batch = next(batches.batches("VariableImage", builder, selection, part))
    assert {each.shape for each in batch["picture"]} == {(2, 2, 3), (2, 3, 3)}
    assert selection.specs["picture"].shape == (None, None, 3)
    assert selection.specs["label"].num_classes == 3


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        (1, "int64", ()),
        (True, "bool", ()),
        (1.5, "float32", ()),
        (np.float64(1.5), "float32", ()),
        (np.uint8(3), "uint8", ()),
        ([1, 2], "int64", (2,)),
        ([[1.0], [2.0]], "float32", (2, 1)),
        ("text", "string", ()),
        (b"a\x00", "string", ()),
        (["a", "bc"], "string", (2,)),
        ([], "float32", (0,)),
        (np.array(["a"]), "string", (1,)),
        (tf.constant([1, 2]), "int32", (2,)),
        (tf.constant("a"), "string", ()),
    ],
)
def test_values(value, dtype, shape):
    found = make_value("x", value)
    assert (get_dtype(found), found.shape) == (dtype, shape)


def test_texts_are_their_bytes():
    assert make_value("x", "ä").item() == "ä".encode()
    assert make_value("x", b"\xff\x00").item() == b"\xff\x00"
    assert make_value("x", "\udcff").item() == b"\xff"


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (None, "returns None for 'x'"),
        ([1, None], "which cannot be stored"),
        ([[1], [1, 2]], "lists of different lengths"),
        ({1}, "type set"),
        (np.datetime64("2020-01-01"), "cannot be stored"),
        (1j, "complex128"),
    ],
)
def test_what_cannot_be_stored(value, what):
    with pytest.raises(UnsuitableError, match=what):
        make_value("x", value)


@pytest.mark.parametrize("result", [[1], "x", {1: 2}, {}])
def test_what_is_returned_has_to_be_a_dict(result):
    with pytest.raises(UnsuitableError, match="dict"):
        make_example(result)


@pytest.mark.parametrize(
    ("value", "said", "dtype"),
    [
        ("12", "int", "int64"),
        ("1.5", "float", "float32"),
        (12, "text", "string"),
        (1, "bool", "bool"),
        (1, "class", "int64"),
    ],
)
def test_a_type_that_is_said(value, said, dtype):
    assert get_dtype(convert_value("x", make_value("x", value), said)) == dtype


def test_a_type_that_it_is_not():
    with pytest.raises(UnsuitableError, match="returns 'x' as string, which is not of type int"):
        convert_value("x", make_value("x", "twelve"), "int")


def test_a_feature_holds_all_of_its_first_values():
    leaf = infer_leaf("x", [make_value("x", [1, 2]), make_value("x", [0.5, 1.0, 2.0])])
    assert (leaf.shape, leaf.dtype) == ((None,), "float32")
    with pytest.raises(UnsuitableError, match="with shape"):
        infer_leaf("x", [make_value("x", [1]), make_value("x", 1)])


def test_only_a_wider_type_is_made_of_a_value():
    spec = FeatureSpec(shape=(), dtype="float32", stored="float")
    assert store_value("x", make_value("x", 1), spec, None).dtype == np.float32
    whole = FeatureSpec(shape=(), dtype="int64", stored="int")
    with pytest.raises(UnsuitableError, match=r"returns 'x' as float32, but as .* for the first"):
        store_value("x", make_value("x", 1.5), whole, None)
