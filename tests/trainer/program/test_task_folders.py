"""Tests what a program receives: its environment, its command line, and its part of the data."""

import io
import json
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from flotilla.trainer import storage
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.data.blocks import complete, parse_blocks
from flotilla.trainer.data.features import choose_stored_form
from flotilla.trainer.features.dataset_spec import SCHEMA, DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.names import length_name
from flotilla.trainer.program.task_folders import (
    FEATURES_FILE,
    guard_environment,
    make_start,
    stage_dataset,
)
from flotilla.trainer.runtime.errors import UserError
from tests.trainer.data.test_blocks import NUMBERS, encode, kind
from tests.trainer.program.runs import make_job

CLUSTER = Cluster(addresses={"ps": ("a:1",), "worker": ("b:1", "c:1")})
TASK = Task(role="worker", index=1)


POD = {"resources": {"limits": {"nvidia.com/gpu": 2}}}


@pytest.mark.parametrize(
    "cluster", [{"gpus_per_worker": 2}, {"launcher": "jobset", "kubernetes": {"pod": POD}}]
)
def test_the_words_and_the_environment_are_filled(tmp_path, cluster):
    words = [
        "--ps_hosts={ps_hosts}", "--worker_hosts={worker_hosts}", "--job_name={role}",
        "--task_index={task_index}", "--gpu={gpu}", "--data={dataset_files}", '{"a": 1}',
    ]  # fmt: skip
    job = make_job(
        tmp_path,
        "",
        *words,
        roles={"ps": 1, "worker": 2},
        program={"env": {"OWN": "{steps} {seed}"}, "data": "files"},
        cluster=cluster,
    )
    start = make_start(job, CLUSTER, TASK, 3)
    assert start["command"][2:] == [
        "--ps_hosts=a:1", "--worker_hosts=b:1,c:1", "--job_name=worker", "--task_index=1",
        "--gpu=1", f"--data={job.workdir}/dataset", '{"a": 1}',
    ]  # fmt: skip
    env = start["env"]
    assert env["OWN"] == "1500 0"
    assert json.loads(env["TF_CONFIG"])["task"] == {"type": "worker", "index": 1}
    assert env["FLOTILLA_CHECKPOINTS"] == f"{job.workdir}/checkpoints"
    assert env["FLOTILLA_RUN_ID"] == "run"


def test_a_guard_inherits_nothing_of_our_own_processes(monkeypatch):
    for name in ("FLOTILLA_JOB", "FLOTILLA_HEARTBEAT", "PYTHONSAFEPATH", "OWN"):
        monkeypatch.setenv(name, "1")
    found = guard_environment("/bin/of/python")
    assert found["OWN"] == "1"
    assert not {"FLOTILLA_JOB", "FLOTILLA_HEARTBEAT", "PYTHONSAFEPATH"} & found.keys()
    assert found["PATH"].startswith("/bin/of/python:")


READER = Path(__file__).parents[3] / "examples/programs/rows.py"
ROWS = 7


@pytest.fixture(scope="module")
def read_rows():
    return runpy.run_path(str(READER))["read_rows"]


def fixed(shape, dtype):
    return FeatureSpec(shape=shape, dtype=dtype, stored=choose_stored_form(shape, dtype))


def png(number):
    found = io.BytesIO()
    Image.fromarray(np.full((3 + number, 2, 3), number, np.uint8)).save(found, "PNG")
    return found.getvalue()


def every_form():
    """Return features of every form, with seven rows each."""
    features, rows = {}, {}
    for dtype in NUMBERS:
        for shape in [(), (3,), (2, 2)]:
            values = (np.arange(ROWS * int(np.prod(shape))) - 3).reshape(ROWS, *shape)
            name = f"{dtype} {len(shape)}"
            features[name], rows[name] = fixed(shape, dtype), values.astype(kind(dtype))
    texts = np.array([b"a" * n for n in range(2 * ROWS)], object)
    features["text"], rows["text"] = fixed((), "string"), texts[:ROWS]
    features["texts"], rows["texts"] = fixed((2,), "string"), texts.reshape(ROWS, 2)
    features["\0odd"], rows["\0odd"] = fixed((), "int64"), np.arange(ROWS)
    features["nothing"], rows["nothing"] = fixed((2, 0), "float32"), np.zeros((ROWS, 2, 0), "f4")
    features["image"] = FeatureSpec(shape=(4, 2, 3), dtype="uint8", stored="image")
    rows["image"] = np.array([png(n) for n in range(ROWS)], object)
    for name, dtype, inner in [("long", "int32", ()), ("wide", "float32", (2,))]:
        features[name] = FeatureSpec(shape=(None, *inner), dtype=dtype, stored="sequence")
        rows[name] = [np.full((n % 4, *inner), n, dtype) for n in range(ROWS)]
    features["words"] = FeatureSpec(shape=(None,), dtype="string", stored="sequence")
    rows["words"] = [texts[: n % 3] for n in range(ROWS)]
    return features, rows


def published(root, records, features, shards=(ROWS,)):
    lengths = {length_name(name): fixed((), "int64") for name in features if features[name].varies}
    spec = DatasetSpec(
        features=features | lengths, inputs=("text",), targets=("int64 0",),
        shards={"train": shards, "validation": shards},
    )  # fmt: skip
    draft = root / "draft"
    draft.mkdir(parents=True)
    for split in spec.shards:
        for name in spec.files(split):
            with tf.io.TFRecordWriter(str(draft / name)) as writer:
                for record in records:
                    writer.write(record)
    fields = {
        "dataset_schema": SCHEMA, "inputs": ["text"], "targets": ["int64 0"], "weight": "",
        "group": "", "block_rows": 2, "target_counts": {}, "target_moments": {},
        "features": {name: each.to_json() for name, each in spec.features.items()},
        "splits": {name: {"shards": [*each]} for name, each in spec.shards.items()},
    }  # fmt: skip
    uri = storage.uri_of(root / "dataset")
    storage.publish(draft, uri, kind="dataset", fields=fields)
    return spec, uri


def cluster(**counts):
    ports = iter(range(2000, 3000))
    return Cluster(
        addresses={
            role: tuple(f"127.0.0.1:{next(ports)}" for _ in range(count))
            for role, count in counts.items()
        }
    )


def stage(uri, folder, role="worker", index=0, partition="disjoint", **counts):
    config = Config.model_validate({"data": {"partition": partition}})
    stage_dataset(
        config, cluster(**counts or {"worker": 1}), Task(role=role, index=index), uri, folder
    )
    return {
        split: sorted(int(path.name.split("-")[1]) for path in (folder / split).glob("*.tfrecord"))
        for split in ("train", "validation")
    }


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    root = tmp_path_factory.mktemp("dataset")
    features, rows = every_form()
    spec, uri = published(root, encode(features, rows, 2), features)
    stage(uri, root / "files")
    blocks = list(tf.data.TFRecordDataset(str(root / "files/train" / spec.files("train")[0])))
    return spec, root / "files", parse_blocks(spec.features, tf.stack(blocks))


def bits(values):
    values = np.asarray(values)
    return (
        values.tolist()
        if values.dtype == object
        else (values.dtype, values.shape, values.tobytes())
    )


def same(spec, mine, ours):
    expected = {name for name in spec.features if 0 not in spec.features[name].shape}
    assert len(mine) == len(expected)
    for name in expected:
        found = mine["\0" + name if name.startswith("\0") else name]
        assert bits(found) == bits(ours[name]), name


def test_rows_are_those_of_our_own_reader(staged, read_rows):
    spec, folder, ours = staged
    rows = list(read_rows("train", str(folder)).as_numpy_iterator())
    assert len(rows) == ROWS
    for number, row in enumerate(rows):
        same(spec, row, {name: each[number].numpy() for name, each in ours.items()})


def test_rows_in_a_graph_of_tensorflow_1(staged, read_rows):
    spec, folder, ours = staged
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        rows = read_rows("validation", str(folder))
        each = tf.compat.v1.data.make_one_shot_iterator(rows).get_next()
        first = session.run(each)
    same(spec, first, {name: values[0].numpy() for name, values in ours.items()})


def test_the_reader_in_the_documents(staged, monkeypatch, tmp_path):
    _, folder, ours = staged
    shutil.copytree(folder, tmp_path / "files")
    described = json.loads((folder / FEATURES_FILE).read_text())
    fixed_size = {name: each for name, each in described.items() if not each["lengths"]}
    (tmp_path / "files" / FEATURES_FILE).write_text(json.dumps(fixed_size))
    monkeypatch.setenv("FLOTILLA_DATASET_FILES", str(tmp_path / "files"))
    page = (READER.parents[2] / "docs/how-to/own-program.md").read_text()
    names = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    rows = list(names["rows"].as_numpy_iterator())
    assert len(rows) == ROWS
    for name in ("int64 0", "bfloat16 2", "texts", "image", "uint64 1"):
        assert [bits(row[name]) for row in rows] == [bits(each) for each in ours[name].numpy()]


def test_images_and_batches_of_sequences(staged, read_rows):
    spec, folder, ours = staged
    described = json.loads((folder / FEATURES_FILE).read_text())
    height, width, channels = described["image"]["image"]
    names = ["image", "long", "wide", "words"]

    def finish(row):
        image = tf.io.decode_image(row["image"], channels, expand_animations=False)
        image = tf.image.resize(image, [height, width])
        return {
            "image": tf.cast(tf.round(image), "uint8"),
            **{name: row[name] for name in names[1:]},
        }

    batch = read_rows("train", str(folder)).map(finish).padded_batch(ROWS).get_single_element()
    whole = complete(spec.features, {name: ours[name] for name in names})
    for name in names:
        np.testing.assert_array_equal(batch[name].numpy(), whole[name].numpy())


def test_the_description_says_roles_and_forms(staged):
    described = json.loads((staged[1] / FEATURES_FILE).read_text())
    assert described["uint32 1"] == {
        "wire": "string", "raw": "int32", "dtype": "uint32", "shape": [3], "lengths": "",
        "image": None, "label": False, "input": False, "classes": None,
    }  # fmt: skip
    assert described["int64 0"]["label"]
    assert described["text"]["input"]
    assert described["wide"]["shape"] == [2]
    assert "nothing" not in described


FOUR = [0, 1, 2, 3]
SMALL = {"text": fixed((), "string"), "int64 0": fixed((), "int64")}


@pytest.mark.parametrize(
    ("task", "partition", "train"),
    [
        ("worker-1 of ps=1 worker=2", "disjoint", [1, 3]),
        ("worker-1 of ps=1 worker=2", "reshuffle", FOUR),
        # With parameter servers, the chief may only coordinate, so no part is reserved for it.
        ("chief-0 of chief=1 ps=1 worker=2", "disjoint", FOUR),
        ("worker-0 of chief=1 ps=1 worker=2", "disjoint", [0, 2]),
        ("chief-0 of chief=1 worker=2", "disjoint", [0, 3]),
        ("worker-1 of chief=1 worker=2", "disjoint", [2]),
        ("chief-0 of chief=1", "disjoint", FOUR),
        ("evaluator-0 of worker=2", "disjoint", []),
    ],
)
def test_the_part_of_a_task(tmp_path, task, partition, train):
    _, uri = published(tmp_path, [b""], SMALL, (1,) * 4)
    name, _, counts = task.partition(" of ")
    role, index = name.split("-")
    counts = {each: int(count) for each, count in (part.split("=") for part in counts.split())}
    found = stage(uri, tmp_path / "files", role, int(index), partition, **counts)
    assert found == {"train": train, "validation": FOUR}


def test_a_server_has_no_dataset_and_another_part_replaces_the_earlier_one(tmp_path):
    _, uri = published(tmp_path, [b""], SMALL, (1,) * 4)
    stage(uri, tmp_path / "none", "ps", ps=1, worker=1)
    assert not (tmp_path / "none").exists()
    stage(uri, tmp_path / "files")
    assert stage(uri, tmp_path / "files", index=2, worker=4)["train"] == [2]
    with pytest.raises(UserError, match=r"data.shards: 5 tasks cannot share the 4 shards"):
        stage(uri, tmp_path / "files", worker=5)
