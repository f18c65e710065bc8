"""Tests `flotilla predict`: how model and output are selected, and the process that predicts."""

import csv
import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from flotilla.pipelines import predict
from flotilla.pipelines.cli import app
from flotilla.trainer import storage
from flotilla.trainer.promotion import registry
from flotilla.trainer.runtime.errors import UserError
from tests.pipelines.called import FLOTILLA, call
from tests.pipelines.conftest import publish_model, register_models
from tests.trainer.prediction import made_model

# Tolerance of the exported model, as in `flotilla.trainer.export.formats`.
TOLERANCE = 1e-5


@pytest.fixture
def root(tmp_path):
    """Create a storage root with two versions of `digits`; version 1 is the champion."""
    root = storage.uri_of(tmp_path / "runs")
    register_models(root, tmp_path, 2, champions=1)
    return root


def test_a_model_is_named_by_name_version_folder_or_uri(root, tmp_path):
    versions = storage.join(registry.home(root, "digits"), "versions")
    assert predict.model_uri("digits", root) == storage.join(versions, "000001")
    assert predict.model_uri("digits@2", root) == storage.join(versions, "000002")
    folder = tmp_path / "model-1"
    assert predict.model_uri(str(folder), root) == storage.uri_of(folder)
    for uri in (storage.uri_of(folder), "s3://bucket/model", "gs://bucket/model"):
        assert predict.model_uri(uri, root) == uri


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("digit", "no model 'digit' is registered .*did you mean 'digits'"),
        ("digits@3", "digits has no version 3"),
        *((each, "write NAME, NAME@3 or a URI") for each in ("digits@x", "@3", "")),
        ("http://host/model", "is not a storage URI"),
        ("gs://bucket/a//b", "empty part"),
        ("m", "add a version, such as m@1"),
    ],
)
def test_a_model_that_is_none_is_one_line(root, tmp_path, model, says):
    if model == "m":
        registry.register(root, "m", publish_model(tmp_path, 3), lineage={}, scratch=tmp_path)
    with pytest.raises(UserError, match=says):
        predict.model_uri(model, root)


@pytest.mark.parametrize(
    ("output", "said", "form"),
    [
        ("-", "", "jsonl"), ("-", "csv", "csv"), ("a/b.csv", "", "csv"),
        ("b.parquet", "", "parquet"), ("b.jsonl", "", "jsonl"), ("b.txt", "csv", "csv"),
    ],
)  # fmt: skip
def test_the_ending_says_the_form(output, said, form):
    assert predict.choose_format(output, said) == form


@pytest.mark.parametrize("columns", ["id,city", ["id", "city"]])
def test_rows_are_asked_about_as_a_file_is(root, tmp_path, monkeypatch, columns):
    asked = []

    def answered(request, _on_event):
        asked.append(request)
        with open(request["inputs"][0], encoding="utf-8") as file:
            rows = [{"prediction": json.loads(line)["age"], "a": "x\u2028y"} for line in file]
        with open(request["output"], "w", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
        return predict.Prediction(model=request["model"], output=request["output"], rows=len(rows))

    class Frame:
        def to_dict(self, _form):
            return [{"age": np.int64(4), "city": "Rome"}, {"age": float("nan"), "city": "Köln"}]

    monkeypatch.setattr(predict, "answer", answered)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "runs"))
    before = os.listdir(tmp_path / "runs")
    for inputs in (Frame(), Frame().to_dict("records")):
        found = predict.predict("digits@2", inputs, columns=columns, root=root)
        assert [each["prediction"] for each in found.predictions] == [4, None]
        assert (found.rows, found.output) == (2, "")
    assert asked[0]["columns"] == ["id", "city"]
    assert os.listdir(tmp_path / "runs") == before


def flotilla(*arguments, capsys):
    code = app.call(["predict", *map(str, arguments)])
    written = capsys.readouterr()
    assert len(written.err.splitlines()) == 1
    return code, written.err


@pytest.mark.usefixtures("root")
def test_wrong_usage_is_one_line_and_starts_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(predict, "answer", None)
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "in.csv"
    data.write_text("a\n1\n")
    linked = tmp_path / "link.csv"
    linked.hardlink_to(data)
    for arguments, says in (
        (["digits"], "INPUT is missing: give files"),
        (["digits", ""], "INPUT is empty"),
        (["digits", data, "--split", "test"], "--split"),
        (["digits", data, "-o", "x.txt"], "does not end with one of"),
        (["digits", data, "-o", tmp_path / "runs", "--to", "csv"], "is a folder"),
        (["digits", data, "-o", linked], "is also an input"),
        (["digits", data, "-o", "s3://bucket/out.csv"], "not a path on this machine"),
        (["digits", data, "--to", "parquet"], "needs an output file"),
        (["digits", data, "--batch-size", "-1"], "batch-size"),
        (["digits", data, "--to", "xml"], "--to"),
        (["nothing", data], "no model 'nothing'"),
    ):
        code, line = flotilla(*arguments, "--workdir", tmp_path / "runs", capsys=capsys)
        assert code == 2, line
        assert says in line


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Create a folder with a registered model that computes sums, and 300,000 rows for it."""
    folder = tmp_path_factory.mktemp("work")
    root = storage.uri_of(folder / "runs")
    model = made_model.sums(folder / "m")
    registry.register(root, "m", model, lineage={}, scratch=folder)
    registry.promote(root, "m", 1, after=0, by="me")
    lines = "".join(f"{number},{number}.5,1,Rome\n" for number in range(300_000))
    (folder / "in.csv").write_text("id,age,count,city\n" + lines)
    (folder / "few.csv").write_text("id,age,count,city\n" + lines[:100].rpartition("\n")[0])
    return folder


@pytest.mark.cluster
@pytest.mark.slow
def test_rows_are_written_and_summed_up(work):
    result = call("predict", work / "runs", "m", "few.csv", "-o", "out/few.csv", cwd=work)
    assert result.code == 0, result.err
    with (work / "out/few.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    expected = [number + 1001.5 for number in range(len(found))]
    assert [float(row["prediction"]) for row in found] == expected
    answer = result.answer
    assert (answer["status"], answer["rows"], answer["skipped"]) == ("done", len(found), 0)
    assert answer["output"] == str(work / "out/few.csv")
    assert answer["artifacts"]["model"].endswith("versions/000001")
    assert f"{len(found)} rows (" in result.err


@pytest.mark.cluster
@pytest.mark.slow
def test_a_reader_that_has_enough_and_ctrl_c_end_it_and_leave_nothing(work):
    command = [FLOTILLA, "predict", "m", "in.csv", "--workdir", work / "runs", "--batch-size", "50"]
    with subprocess.Popen(command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as few:
        assert json.loads(few.stdout.readline())["prediction"] == 1001.5
        few.stdout.close()
        assert few.wait() == 0, few.stderr.read()
    before = sorted(os.listdir(work))
    with subprocess.Popen(
        [*command, "--columns", "id"], cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert errors.decode().splitlines()[-1].startswith("flotilla: interrupted")
    assert sorted(os.listdir(work)) == before


@pytest.mark.cluster
@pytest.mark.long
def test_a_process_that_is_killed_leaves_nothing_that_looks_whole(work, tmp_path):
    output = tmp_path / "out.csv"
    request = {"model": storage.uri_of(work / "m"), "inputs": [str(work / "in.csv")]}
    request |= {"output": str(output), "form": "csv", "batch_size": 10}
    over = threading.Event()

    def kill_when_it_writes():
        while not over.wait(0.01):
            for part in tmp_path.glob(".out.csv.*.part"):
                os.kill(int(part.name.split(".")[3]), signal.SIGKILL)
                over.set()

    killer = threading.Thread(target=kill_when_it_writes)
    killer.start()
    try:
        with pytest.raises(UserError, match=r"SIGKILL.*lower --batch-size"):
            predict.answer(request, lambda _event: None)
    finally:
        over.set()
        killer.join()
    assert os.listdir(tmp_path) == []


TABLE = """
name: table
data:
  splits: {train: train.csv, test: test.csv}
  label: bought
  drop: [id]
model: {name: tabular}
training: {strategy: single, steps: 60}
gate: {min: {accuracy: 0.1}}
"""


def write_table(folder, name, rows, seed):
    random = np.random.default_rng(seed)
    with (folder / name).open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["id", "age", "visits", "city", "bought"])
        for number in range(rows):
            age = "" if number % 19 == 0 else f"{random.normal(40, 12):.1f}"
            city = random.choice(["Rome", "Köln", "São Paulo"])
            bought = "yes" if city == "Rome" else "no"
            lines.writerow([number, age, random.integers(9), city, bought])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Run the whole pipeline on a table, which registers the model."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "data").mkdir()
    write_table(folder / "data", "train.csv", 600, 1)
    write_table(folder / "data", "test.csv", 200, 2)
    (folder / "table.yaml").write_text(TABLE.replace("data:", "data:\n  source: data", 1))
    result = call("run", folder / "runs", "table.yaml", cwd=folder)
    assert result.code == 0, result.err
    return folder, result


def probabilities(path):
    with path.open(newline="", encoding="utf-8") as file:
        return {
            row["id"] if "id" in row else row["row"]: float(row["probabilities/yes"])
            for row in csv.DictReader(file)
        }


@pytest.mark.cluster
@pytest.mark.slow
def test_the_answers_are_those_of_the_evaluation(trained):
    """Predictions equal those of the evaluation, for the split and for its rows in a file."""
    folder, result = trained
    evaluation = result.path_of("evaluation")
    logits = np.load(evaluation / "predictions" / "output.npy")
    expected = 1 / (1 + np.exp(-logits[:, 0].astype(np.float64)))
    made = call("predict", folder / "runs", "table", "--split", "test", "-o", "s.csv", cwd=folder)
    assert made.code == 0, made.err
    of_split = probabilities(folder / "s.csv")
    assert np.abs(np.array(list(of_split.values())) - expected).max() <= TOLERANCE
    arguments = ["table", "data/test.csv", "-o", "f.csv", "--columns", "id", "--batch-size", "7"]
    made = call("predict", folder / "runs", *arguments, cwd=folder)
    assert made.code == 0, made.err
    of_file = probabilities(folder / "f.csv")
    assert list(of_file) == [str(number) for number in range(200)]
    # In the shards, the rows have a different order than in the file.
    found = np.sort(list(of_file.values()))
    assert np.abs(found - np.sort(expected)).max() <= TOLERANCE


PEAK = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)
sys.exit(code)
"""


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_memory_does_not_grow_with_the_rows(trained):
    folder, _ = trained
    peaks = {}
    for rows in (100_000, 1_000_000):
        write_table(folder, "many.csv", rows, 3)
        arguments = ["predict", "table", "many.csv", "-o", "many-out.csv", "--columns", "id"]
        found = subprocess.run(
            [sys.executable, "-c", PEAK, FLOTILLA, *arguments, "--workdir", folder / "runs"],
            cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert found.returncode == 0, found.stderr
        peaks[rows] = int(found.stdout.split()[-1])
        with (folder / "many-out.csv").open("rb") as file:
            assert sum(1 for _ in file) == rows + 1
    # The limit is in MiB. Ten times as many rows would take 300 MiB more if kept in memory.
    assert peaks[1_000_000] - peaks[100_000] < 150, peaks
