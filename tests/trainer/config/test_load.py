"""Tests that a YAML file and `--set` assignments give a configuration or a one-line error.

Hypothesis searches for input that gives neither.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.pipelines import settings as old_parameters
from flotilla.trainer.config import load
from flotilla.trainer.config.load import REMOVED, load_config, parse_config, parse_value
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError

KEYS = [".".join(key) for key, _ in old_parameters.keys().values()]

lines = st.text(max_size=30)
PIECES = [
    *("[", "]", "{", "}", ":", ": ", "- ", ", ", "'", '"', "&a ", "*a", "? ", "<<: ", "|\n", "#"),
    *("!!int ", "!!bool ", "!!timestamp ", "%", "@", "\n", "\t", "\x00", "\ud800", "a", "1", "-"),
    *("1e3", "0x", ".inf", ".nan", "null", "2026-13-45", "true", "=", "~", "9" * 5000, "[" * 300),
]
pieces = st.sampled_from(PIECES)
yaml_like = st.lists(pieces, max_size=8).map("".join)
keys = st.sampled_from(KEYS) | st.lists(
    st.sampled_from(["training", "optimizer", "args", "steps", "model", "min", "", " ", "a\nb"]),
    max_size=4,
).map(".".join)


def refused(call, *args):
    with pytest.raises(ConfigError) as caught:
        call(*args)
    return one_line(caught.value)


def one_line(error):
    message = str(error)
    assert message.strip()
    assert len(message.splitlines()) == 1
    return message


def written(folder, text):
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def is_near(word, allowed):
    return any(f"did you mean '{each}'?" in word for each in allowed)


def test_a_file_with_assignments_over_it(tmp_path):
    path = written(
        tmp_path,
        "name: mnist  # a comment\n"
        "training: {steps: 200, optimizer: {name: sgd, learning_rate: 1e-2}}\n"
        "gate:\n  min: {accuracy: 0.9}\n",
    )
    config = load_config(
        path, ["training.steps=300", " gate.max.loss =0.5", "model.args.dropout=0.1"]
    )
    assert config.name == "mnist"
    assert config.training.steps == 300
    assert config.training.optimizer.learning_rate == 0.01
    assert config.training.optimizer.name == "sgd"
    assert config.gate.min == {"accuracy": 0.9}
    assert config.gate.max == {"loss": 0.5}
    assert config.model.args == {"dropout": 0.1}


def test_assignments_are_applied_in_order(tmp_path):
    assert load_config(None, ["training.steps=1", "training.steps=2"]).training.steps == 2
    assert load_config(None, ["model.args={a: 1}", "model.args.b=2"]).model.args == {"a": 1, "b": 2}
    assert load_config(None, ["model.args.b=2", "model.args={a: 1}"]).model.args == {"a": 1}
    path = written(tmp_path, "training: 3\n")
    message = refused(load_config, path, ["training.steps=4"])
    assert message == "--set 'training.steps=4': training is not a section"


@pytest.mark.parametrize("text", ["", "\n# nothing\n", "{}", "---\n"])
def test_an_empty_file_is_the_defaults(tmp_path, text):
    assert load_config(written(tmp_path, text)) == Config()
    assert load_config(None) == Config()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e6", 1e6), ("1E-3", 1e-3), ("2.5e+3", 2500.0), (".5e1", 5.0), ("-1e3", -1000.0),
        ("3", 3), ("0.5", 0.5), ("true", True), ("e5", "e5"), ("1e", "1e"), ("3.0.1", "3.0.1"),
        ("'1e6'", "1e6"), ("[1e3, {a: 2e0}]", [1000.0, {"a": 2.0}]), ("", None), ("a b", "a b"),
    ],
)  # fmt: skip
def test_a_value_is_yaml_with_the_numbers_that_people_write(text, value):
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "[", "{a", "'", "!!int x", "!!bool x", "!!timestamp x", "2026-13-45", "!!python/name:os.x",
        "{[1]: 2}", "*a", "\x00", "{a: 1, a: 2}", "[" * 400, "9" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_value_is_refused_with_its_key(text):
    said = f"{text!r} is not a valid YAML value"
    message = refused(load_config, None, [f"training.steps={text}"])
    assert message.endswith("is not a valid YAML value")
    if len(text) < 1000:
        assert refused(parse_value, text) == said
        assert message.startswith(f"--set {f'training.steps={text}'!r}: ")
    else:
        assert max(len(message), len(refused(parse_value, text))) < 1010


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("training.stepss=3", "training.stepss: no such key; did you mean 'steps'?"),
        ("trainin.steps=3", "trainin: no such key; did you mean 'training'?"),
        ("training.optimizer.nam=sgd", "training.optimizer.nam: no such key; did you mean 'name'?"),
        ("training.learning_rate=0.1",
         "training.learning_rate: no such key; did you mean 'training.optimizer.learning_rate'?"),
        ("training.workers=2", "training.workers: no such key; did you mean 'cluster.workers'?"),
        ("training.optimizer.xyz=1", "training.optimizer.xyz: no such key (one of name, learning_"),
        ("gate.minimum={}", "gate.minimum: no such key; did you mean 'min'?"),
        ("xyz=1", "xyz: no such key (one of name, data, task, model, training, cluster, program,"),
        ("training.steps.x=3", "training.steps: {'x': 3} is not allowed"),
        ("data.label=", "data.label: None is not allowed"),
        ("data.label=null", "data.label: None is not allowed"),
        ("data.weight=~", "data.weight: None is not allowed"),
        ("training=3", "training: 3 is not allowed"),
        ("name", "--set 'name' does not have the form section.key=value"),
        ("=3", "--set '=3' does not have the form section.key=value"),
        (" =3", "--set ' =3' does not have the form section.key=value"),
        ("", "--set '' does not have the form section.key=value"),
        ("train\ning.steps=3", "train ing: no such key; did you mean 'training'?"),
        ('training.steps="\\ud800"', "the configuration cannot be written as JSON: "),
        ("model.args=&a {a: *a}",
         "the configuration cannot be written as JSON: Circular reference"),
        (f"model.args={{a: {'[' * 300}{']' * 300}}}",
         "the configuration cannot be written as JSON: "),
    ],
)  # fmt: skip
def test_a_wrong_assignment(assignment, said):
    assert refused(load_config, None, [assignment]).startswith(said)


def test_mistakes_name_their_keys_in_one_line():
    wrong = {"training": {"steps": 0, "keep": 0}, "nam": 1, "model": {"name": "mpl"}}
    message = refused(parse_config, wrong)
    assert message.count("; ") >= 2
    assert "training.steps: 0" in message
    assert "training.keep: 0" in message
    for key in KEYS:
        assert refused(load_config, None, [f"{key}=[[1]]"]).startswith((f"{key}: ", f"{key}.0: "))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n- b\n", "must contain sections with keys, not a list"),
        ("training\n", "must contain sections with keys, not a single value"),
        ("training: [\n", "is not valid YAML at line 2, column 1: "),
        ("a: b: c\n", "is not valid YAML at line 1, column 5: mapping values are not allowed here"),
        ("\ttraining: 1\n", "is not valid YAML at line 1, column 1: "),
        ("name: \x00\n", "is not valid YAML: unacceptable character"),
        ("name: !!python/object:os.system x\n", "at line 1, column 7: could not determine"),
        ("a: !!int x\n", "is not valid YAML: invalid literal for int()"),
        ("a: 2026-13-45\n", "is not valid YAML: month must be in 1..12"),
        ("a: 1\n---\nb: 2\n", "is not valid YAML at line 2, column 1: "),
        ("{" * 400, "is not valid YAML"),
        ("training: {steps: 1}\nname: a\ntraining: {keep: 1}\n", "line 3, column 1: the key 'tr"),
        ("gate: {min: {a: 1, a: 2}}", "line 1, column 20: the key 'a' occurs twice"),
    ],
)
def test_a_broken_file_is_named_with_the_place(tmp_path, text, said):
    path = written(tmp_path, text)
    message = refused(load_config, path)
    assert message.startswith(str(path))
    assert said in message


def test_keys_may_be_equal_merged_or_aliases(tmp_path):
    path = written(
        tmp_path, "training: &t {seed: 1, keep: 2}\ndata: {seed: 3}\ncluster: {workers: 3}\n"
    )
    assert load_config(path).data.seed == 3
    merged = parse_value("{a: &x {k: 1, l: 2}, b: {<<: *x, k: 3}}")
    assert merged["b"] == {"k": 3, "l": 2}
    path = tmp_path / "config.yaml"
    path.write_text("training: {steps: &n 7, checkpoint_every: *n}\n")
    assert load_config(path).training.checkpoint_every == 7


@settings(deadline=None, max_examples=50)
@given(st.one_of(lines, yaml_like, st.builds("{}={}".format, keys, st.one_of(lines, yaml_like))))
def test_any_assignment_is_a_configuration_or_one_line(assignment):
    try:
        config = load_config(None, [assignment])
    except ConfigError as error:
        one_line(error)
    else:
        assert Config.model_validate_json(config.model_dump_json()) == config


@settings(deadline=None, max_examples=50)
@given(yaml_like)
def test_any_file_is_a_configuration_or_one_line(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        assert load_config(path) == Config()
    except ConfigError as error:
        one_line(error)


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(KEYS), st.data())
def test_a_slip_in_a_key_is_answered_with_a_key_that_there_is(key, data):
    *sections, name = key.split(".")
    model = Config
    for section in sections:
        model = model.model_fields[section].annotation
    at = data.draw(st.integers(0, len(name) - 1))
    slip = name[:at] + data.draw(st.sampled_from(["", "x", name[at] * 2])) + name[at + 1 :]
    if not slip or slip in model.model_fields:
        return
    message = refused(load_config, None, [f"{'.'.join([*sections, slip])}=1"])
    assert message.startswith(f"{'.'.join([*sections, slip])}: no such key")
    assert is_near(message, model.model_fields) or f"one of {', '.join(model.model_fields)}" in (
        message
    )


@pytest.mark.parametrize("key", [each for each in REMOVED if each not in KEYS])
def test_a_key_of_an_earlier_version_says_what_to_use(key):
    assert refused(load_config, None, [f"{key}=1"]) == f"{key}: removed in 0.2; {REMOVED[key]}"


def test_a_configuration_that_an_earlier_version_recorded_is_read():
    tree = Config().model_dump(mode="json")
    tree["training"] |= {"cached_rows": 0, "cache_staleness": 16, "checkpoint_differences": 0.0}
    tree["cluster"] |= {"snapshot_seconds": 0.0}
    assert parse_config(tree) == Config()
    tree["training"]["cached_rows"] = 100
    assert refused(parse_config, tree).startswith("training.cached_rows: removed in 0.2")


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_aliases_that_fill_the_memory_are_one_line(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(LAUGHS)
    with pytest.raises(
        ConfigError, match=r"its aliases expand to more than 100000 values$"
    ) as error:
        load_config(path)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"^--set .* is not a valid YAML value$"):
        load_config(None, [f"model.args={{{LAUGHS.strip().replace(chr(10), ', ')}}}"])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "not a file"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(b"\x00\xff" * 100), "not UTF-8 text"),
        (lambda path: path.write_bytes(b" " * (1 << 18)), "larger than 128 KiB, the maximum for"),
        (lambda path: (path.touch(), os.truncate(path, 1 << 40)), "larger than 128 KiB"),
        (lambda _: None, "No such file or directory"),
    ],
)
def test_what_is_no_configuration_is_not_waited_for(tmp_path, make, reason):
    path = tmp_path / "config.yaml"
    make(path)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value).startswith(f"cannot read the configuration {path}: {reason}")


def test_a_relative_path_is_relative_to_the_file_that_names_it(tmp_path, monkeypatch):
    (tmp_path / "dir ü").mkdir()
    monkeypatch.chdir(tmp_path)
    path = "dir ü/a.yaml"
    (tmp_path / path).write_text("data: {source: ../b/*.csv, manual_dir: c}", encoding="utf-8")
    found = load_config(path, rebases=True).data
    assert (found.source, found.manual_dir) == ("b/*.csv", "dir ü/c")
    assert load_config(path, ["data.source=b.csv"], rebases=True).data.source == "b.csv"
    assert load_config(path).data.manual_dir == "c"


@pytest.mark.parametrize("source", ["gs://b/c.csv", "/d/e.csv", "~/f.csv", "file:///g.csv"])
def test_other_places_stay_as_they_are(tmp_path, source):
    (tmp_path / "a.yaml").write_text(f"data: {{source: {source}}}")
    assert load_config(tmp_path / "a.yaml", rebases=True).data.source == source


def test_names_are_read_as_they_are_written(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {source: a.csv, label: 2, inputs: [no, 1e3, 2025-01-01], drop: yes, weight: 010,\n"
        "       types: {on: class, 1_0: int}, splits: {column: off}, version: 1.0}\n"
        "training: {class_weights: {no: 1, yes: 4, 2: 3, true: 5, 1.0: 2}, steps: 7}\n"
        "evaluation: {slices: [12:30]}\n"
        "task: {outputs: {2: {class_weights: {Off: 1}}}}\n"
    )
    config = load_config(path, ["data.group=1.50"])
    data = config.data
    assert (data.label, data.drop, data.weight) == (("2",), ("yes",), "010")
    assert (data.inputs, data.types) == (
        ("no", "1e3", "2025-01-01"), {"on": "class", "1_0": "int"}
    )  # fmt: skip
    assert (data.splits.column, data.group, data.version) == ("off", "1.50", "1.0")
    assert config.training.class_weights == {"no": 1, "yes": 4, "2": 3, "true": 5, "1.0": 2}
    assert config.training.steps == 7
    assert config.evaluation.slices == ("12:30",)
    assert config.task.outputs["2"].class_weights == {"Off": 1}


@pytest.mark.parametrize("label", [2, True, [2], [False]])
def test_a_name_in_json_that_is_no_text_has_to_be_quoted(label):
    with pytest.raises(ConfigError, match="it must be a string; write it in quotes"):
        parse_config({"data": {"source": "a.csv", "label": label}})


def test_many_wrong_keys_are_each_looked_at_once():
    class Place(tuple):
        compared = 0

        def __eq__(self, other):
            Place.compared += 1
            return tuple.__eq__(self, other)

        def __hash__(self):
            return tuple.__hash__(self)

    class Invalid:
        def errors(self):
            return [{"loc": Place(("data", f"k{i}"))} for i in range(3000)]

    assert len(load._innermost(Invalid())) == 3000
    assert Place.compared < 10_000
