"""Tests that files of every format give the same predictions, and that errors take one line."""

from __future__ import annotations

import csv
import fcntl
import gzip
import io
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.events import DataNote, listen
from flotilla.trainer.prediction.inputs import Request
from flotilla.trainer.prediction.predict import predict
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.signing import PRIVATE_KEY, PUBLIC_KEY, UnsignedError, sign
from tests.stores.fixtures import bucket_name
from tests.trainer.prediction import made_model
from tests.trainer.signing.test_signing import key_pair

ROWS = [
    {"id": "a", "age": 1.5, "count": 2, "city": "Rome"},
    {"id": "b", "age": 2.5, "count": 3, "city": "Köln"},
    {"id": "c", "age": 3.5, "count": 4, "city": ""},
    {"id": "d", "age": 4.5, "count": 5, "city": "Rome"},
]
SUMS = [1003.5, 5.5, 7.5, 1009.5]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return made_model.sums(tmp_path_factory.mktemp("model") / "published")


def write_csv(path, rows=ROWS):
    text = io.StringIO()
    lines = csv.DictWriter(text, list(rows[0]))
    lines.writeheader()
    lines.writerows(rows)
    data = text.getvalue().encode()
    packed = gzip.compress if path.suffix == ".gz" else bytes
    path.write_bytes(packed(data))
    return path


def write_jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path, rows=ROWS):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def asked(model, paths, output, **more):
    notes = []
    inputs, form = tuple(str(path) for path in paths), output.suffix[1:]
    request = Request(model=model, inputs=inputs, output=str(output), form=form, **more)

    def note(event):
        if isinstance(event, DataNote):
            notes.append(event.text)

    with listen(note):
        return predict(request), notes


def read(path):
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return list(csv.DictReader(io.StringIO(path.read_text(), newline="")))


@pytest.mark.parametrize(
    ("name", "write", "output"),
    [
        ("in.csv", write_csv, "out.csv"),
        ("in.csv.gz", write_csv, "out.jsonl"),
        ("in.jsonl", write_jsonl, "out.parquet"),
        ("in.parquet", write_parquet, "out.csv"),
    ],
)
def test_each_form_becomes_each_form(model, tmp_path, name, write, output):
    summary, notes = asked(model, [write(tmp_path / name)], tmp_path / output, columns=("id",))
    found = read(tmp_path / output)
    assert [float(row["prediction"]) for row in found] == SUMS
    assert [row["id"] for row in found] == list("abcd")
    assert [int(row["row"]) for row in found] == [1, 2, 3, 4]
    assert (summary.rows, summary.skipped, summary.unsound) == (4, 0, 0)
    assert notes == []
    assert sorted(os.listdir(tmp_path)) == sorted([name, output])


def test_columns_that_the_model_does_not_take_are_named_once(model, tmp_path):
    paths = [write_csv(tmp_path / "a.csv"), write_csv(tmp_path / "b.csv")]
    _, notes = asked(model, paths, tmp_path / "out.jsonl")
    assert notes == ["ignoring columns that the model does not use: id"]
    found = read(tmp_path / "out.jsonl")
    assert [(row["file"], row["row"]) for row in found] == [
        (name, row) for name in ("a.csv", "b.csv") for row in (1, 2, 3, 4)
    ]
    assert [row["prediction"] for row in found] == SUMS * 2


def test_the_order_of_columns_is_free_and_a_folder_or_a_pattern_names_files(model, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write_csv(folder / "1.csv", [dict(reversed(row.items())) for row in ROWS])
    write_csv(folder / "2.csv")
    # The size of a batch changes nothing.
    for given, size in ((folder, 0), (folder / "*.csv", 1)):
        asked(model, [given], tmp_path / "out.csv", columns=("*",), batch_size=size)
        found = read(tmp_path / "out.csv")
        assert [float(row["prediction"]) for row in found] == SUMS * 2
        assert found[0].keys() == {"file", "row", "id", "age", "count", "city", "prediction"}


def test_a_missing_number_is_what_it_was_in_training(model, tmp_path):
    rows = [{**ROWS[0], "age": ""}, ROWS[1]]
    path = write_csv(tmp_path / "in.csv", rows)
    summary, notes = asked(model, [path], tmp_path / "out.jsonl", columns=("id",))
    assert [row["prediction"] for row in read(tmp_path / "out.jsonl")] == [None, 5.5]
    assert summary.unsound == 1
    assert notes == ["1 of 2 rows have a prediction that is not finite"]


def bad_csv(path):
    path.write_text(
        "age,count,city\n1,2,Rome\nold,3,Köln\n4,5,Rome,more\n\n4.5,5.5,Rome\n5,6,Rome\n"
    )
    return path


def test_a_bad_row_is_named_with_file_and_line_and_nothing_is_written(model, tmp_path):
    path = bad_csv(tmp_path / "in.csv")
    output = tmp_path / "out.csv"
    output.write_text("before")
    with pytest.raises(UserError) as caught:
        asked(model, [path], output)
    message = str(caught.value)
    assert "in.csv, row " in message
    assert "--skip-bad" in message
    assert output.read_text() == "before"
    assert sorted(os.listdir(tmp_path)) == ["in.csv", "out.csv"]


def test_bad_rows_are_left_out_on_request_and_counted(model, tmp_path):
    path = bad_csv(tmp_path / "in.csv")
    summary, notes = asked(model, [path], tmp_path / "out.csv", skip_bad=True)
    found = read(tmp_path / "out.csv")
    values = [(int(row["row"]), float(row["prediction"])) for row in found]
    assert values == [(1, 1003.0), (5, 1011.0)]
    assert (summary.rows, summary.skipped) == (2, 3)
    assert "3 rows were skipped" in notes[-1]
    assert "in.csv, row 3: 'age' is not of type float ('old')" in notes[-1]


def test_the_share_of_bad_rows_of_the_training_data_holds_here_too(tmp_path):
    for share, is_allowed in ((0.7, True), (0.3, False)):
        folder = tmp_path / str(share)
        folder.mkdir()
        model = made_model.sums(folder / "m", data={"bad_rows": share})
        path = bad_csv(folder / "in.csv")
        if is_allowed:
            assert asked(model, [path], folder / "out.csv")[0].skipped == 3
        else:
            with pytest.raises(UserError, match="3 of 5 rows"):
                asked(model, [path], folder / "out.csv")
            assert not (folder / "out.csv").exists()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("in.csv", "", "is empty"),
        ("in.csv", "age,counts,city\n1,2,Rome\n", "did you mean 'counts'"),
        ("in.csv", "1,2,3\n1,2,3\n", "no header"),
        ("in.csv", "age,count,city\nx,y,Rome\n", "row 2: 'age' is not of type float ('x')"),
        ("in.csv", "age,count,city\n1,,Rome\n2,3,Rome\n", "row 2: 'count' is not of type int"),
        ("in.jsonl", "", "no JSON object"),
        ("in.jsonl", '{"age": 1, "count": 2, "city": "x"}\n{"a', "row 2: it is not JSON"),
        ("in.parquet", "no parquet", "is not a valid Parquet file"),
        ("in.xyz", "age", "--format"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(model, tmp_path, name, text, says):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        asked(model, [path], tmp_path / "out.csv")
    message = str(caught.value)
    assert says in message
    assert "in." in message
    assert "\n" not in message
    assert "data.source" not in message
    assert os.listdir(tmp_path) == [name]


def test_files_of_two_formats_and_none_are_refused(model, tmp_path):
    paths = [write_csv(tmp_path / "a.csv"), write_jsonl(tmp_path / "b.jsonl")]
    with pytest.raises(ConfigError, match=r"csv \(a\.csv\) and jsonl \(b\.jsonl\); set --format"):
        asked(model, paths, tmp_path / "out.csv")
    with pytest.raises(UserError, match="nothing at"):
        asked(model, [tmp_path / "absent.csv"], tmp_path / "out.csv")


def test_columns_to_copy_have_to_be_there_and_not_to_be_those_of_the_answers(model, tmp_path):
    path = write_csv(tmp_path / "in.csv", [{**row, "prediction": 1} for row in ROWS])
    with pytest.raises(ConfigError, match=r"--columns: .*in.csv has no column 'idd'; did you mean"):
        asked(model, [path], tmp_path / "out.csv", columns=("idd",))
    with pytest.raises(ConfigError, match="--columns: the predictions also have a column 'predi"):
        asked(model, [path], tmp_path / "out.csv", columns=("prediction",))


def test_a_column_of_json_with_several_types_cannot_become_parquet(model, tmp_path):
    rows = [{**ROWS[0], "id": n if n < 5 else {"x": "text"}.get("x")} for n in range(9)]
    rows[:0] = [{**ROWS[0], "id": 1}] * 8192
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    with pytest.raises(UserError, match=r"write a .jsonl"):
        asked(model, [path], tmp_path / "out.parquet", columns=("id",), batch_size=8192)
    asked(model, [path], tmp_path / "out.jsonl", columns=("id",), batch_size=8192)


def test_a_damaged_model_is_refused_before_it_is_asked(tmp_path):
    model = made_model.sums(tmp_path / "m")
    path = storage.local_path(model) / "serving/m/1/saved_model.pb"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(storage.Corrupt, match=r"saved_model\.pb"):
        asked(model, [write_csv(tmp_path / "in.csv")], tmp_path / "out.csv")
    other = storage.uri_of(tmp_path / "other")
    storage.publish(tmp_path / "m-source", other, kind="checkpoint")
    with pytest.raises(UserError, match="is of kind 'checkpoint', not 'model'"):
        asked(other, [tmp_path / "in.csv"], tmp_path / "out.csv")


def test_a_model_that_does_not_say_how_it_is_read_is_refused(tmp_path):
    fields = dict(storage.read_manifest(made_model.sums(tmp_path / "m")).fields)
    del fields["reads"]
    old = storage.uri_of(tmp_path / "old")
    storage.publish(tmp_path / "m-source", old, kind="model", fields=fields)
    with pytest.raises(UserError, match=r"exported by an earlier version.*; export it again$"):
        asked(old, [write_csv(tmp_path / "in.csv")], tmp_path / "out.csv")


def test_a_model_without_a_valid_signature_is_not_asked(tmp_path, monkeypatch):
    private, public = key_pair(tmp_path)
    _, other = key_pair(tmp_path, "other")
    data = write_csv(tmp_path / "in.csv")
    unsigned = made_model.sums(tmp_path / "m")
    fields = storage.read_manifest(unsigned).fields
    monkeypatch.setenv(PRIVATE_KEY, str(private))
    sign(tmp_path / "m-source", fields)
    monkeypatch.delenv(PRIVATE_KEY)
    signed = storage.uri_of(tmp_path / "signed")
    storage.publish(tmp_path / "m-source", signed, kind="model", fields=fields)
    monkeypatch.setenv(PUBLIC_KEY, str(public))
    asked(signed, [data], tmp_path / "out.csv")
    assert [float(row["prediction"]) for row in read(tmp_path / "out.csv")] == SUMS
    with pytest.raises(UnsignedError, match="is not signed"):
        asked(unsigned, [data], tmp_path / "none.csv")
    monkeypatch.setenv(PUBLIC_KEY, str(other))
    with pytest.raises(UnsignedError, match="the signature is not valid"):
        asked(signed, [data], tmp_path / "none.csv")
    assert not (tmp_path / "none.csv").exists()


def test_a_disk_that_is_full_leaves_what_was_there(model, tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(28, "No space left on device")

    output = tmp_path / "out.csv"
    output.write_text("before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device; free some space"):
        asked(model, [write_csv(tmp_path / "in.csv")], output)
    assert output.read_text() == "before"
    assert sorted(os.listdir(tmp_path)) == ["in.csv", "out.csv"]


def test_what_a_killed_prediction_left_goes_and_what_another_one_writes_stays(model, tmp_path):
    output, data = tmp_path / "out.csv", write_csv(tmp_path / "in.csv")
    dead, living = (tmp_path / f".out.csv.{number}.part" for number in (1, 2))
    other = tmp_path / ".out.csv.gz.3.part.csv"
    for path in (dead, living, other):
        path.write_text("row")
    with living.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        asked(model, [data], output)
        assert sorted(os.listdir(tmp_path)) == [living.name, other.name, "in.csv", "out.csv"]
    asked(model, [data], output)
    assert sorted(os.listdir(tmp_path)) == [other.name, "in.csv", "out.csv"]


def test_rows_that_have_not_been_through_the_function_of_the_data_are_refused(tmp_path):
    model = made_model.sums(tmp_path / "m", data={"dataset": "digits", "map": "own:rows"})
    with pytest.raises(UserError, match=r"data\.map \(own:rows\), but.*--split") as caught:
        asked(model, [write_csv(tmp_path / "in.csv")], tmp_path / "out.csv")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_files_in_a_bucket_are_read_and_one_that_is_not_there_is_named(
    model, tmp_path, request, scheme
):
    server = request.getfixturevalue("gcs" if scheme == "gs" else "s3")
    bucket = bucket_name()
    server.create_bucket(bucket)
    root = f"{scheme}://{bucket}/in"
    for name in ("1.csv", "2.csv"):
        data = write_csv(tmp_path / name).read_bytes()
        storage.write_bytes(storage.join(root, name), data)
    for given, times in (([f"{root}/1.csv"], 1), ([f"{root}/*.csv"], 2), ([root], 2)):
        asked(model, given, tmp_path / "out.csv")
        found = read(tmp_path / "out.csv")
        assert [float(row["prediction"]) for row in found] == SUMS * times
    for absent in (f"{root}/3.csv", f"{scheme}://{bucket_name()}/in.csv"):
        with pytest.raises(UserError, match=absent.rpartition("/")[0]) as caught:
            asked(model, [absent], tmp_path / "none.csv")
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "none.csv").exists()


def test_what_the_model_says_of_an_input_it_refuses_is_one_line(tmp_path):
    def answer(age):
        tf.debugging.assert_less(age, 100.0, message="nobody is so old")
        return {"prediction": age}

    model = made_model.published(tmp_path / "m", {"age": made_model.AGE}, answer)
    path = write_csv(tmp_path / "in.csv", [{"age": 1}, {"age": 101}])
    with pytest.raises(UserError, match=r"does not accept its input: .*nobody is so old") as caught:
        asked(model, [path], tmp_path / "out.csv")
    assert "\n" not in str(caught.value)


def test_numbers_beyond_the_type_of_a_feature_are_broken(tmp_path):
    spec = made_model.FeatureSpec(shape=(), dtype="uint8", stored="int")

    def answer(level):
        return {"prediction": tf.cast(level, tf.float32)}

    model = made_model.published(tmp_path / "m", {"level": spec}, answer)
    path = write_csv(tmp_path / "in.csv", [{"level": 255}, {"level": 256}])
    with pytest.raises(UserError, match="row 3: 'level' is not of type int"):
        asked(model, [path], tmp_path / "out.csv")
    asked(model, [path], tmp_path / "out.csv", skip_bad=True)
    assert np.allclose([float(row["prediction"]) for row in read(tmp_path / "out.csv")], [255])
