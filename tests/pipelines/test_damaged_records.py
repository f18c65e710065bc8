"""Tests that damaged records cause no traceback and do not hide other runs."""

import io
import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from flotilla.components.records.step_record import read_records
from flotilla.pipelines import models
from flotilla.pipelines.cli.display import closing_table
from flotilla.pipelines.retention.removal import collect
from flotilla.pipelines.runs import control, local
from flotilla.pipelines.runs.control import compare
from flotilla.trainer import storage
from flotilla.trainer.checkpoints.history import History
from flotilla.trainer.checkpoints.index import list_checkpoints
from flotilla.trainer.cluster.lease import Lease
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.events import RunEnd
from flotilla.trainer.promotion import registry
from flotilla.trainer.runtime.errors import UserError
from tests.pipelines.conftest import register_models
from tests.pipelines.step_events import done, promoted, write

WHOLE, DAMAGED = "digits-20260101-000000-aaaa", "digits-20260102-000000-bbbb"
MODEL = "digits"
LINEAGE = {"run_id": WHOLE, "metrics": {"accuracy": 0.9}}
EXAMPLES = 1000

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9),
    st.sampled_from([10**30, -(10**400), 1e308, 2**63, "[/]", "[red]", "\ud800", "a\nb\x1b[2J"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
JUNK = st.sampled_from(
    [b"", b"\0" * 99, b"{", b"[]", b"{}", b"null", b"3", b'"text"', b"NaN", b"\xff\xfe\x00",
     b"[" * 9999, b'{"a":' * 9999, b"\n" * 50, b"\xef\xbb\xbf{}", b"9" * 5000]
) | st.binary(max_size=60)  # fmt: skip
PLACES = st.sampled_from(["folder", "fifo", "loop", "dangling", "absent"])


# The damage to a file: new content or a replacement.
DAMAGES = st.one_of(
    st.tuples(st.just("junk"), JUNK),
    st.tuples(st.just("cut"), st.floats(0, 1)),
    st.tuples(st.just("flip"), st.integers(0, 2**20)),
    *[st.tuples(st.just("value"), st.tuples(st.integers(0, 2**20), VALUES))] * 2,
    st.tuples(st.just("twice"), VALUES),
    st.tuples(st.just("place"), PLACES),
)


def fields_of(tree, path=()):
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for name, value in pairs:
        yield (*path, name)
        if isinstance(value, dict | list):
            yield from fields_of(value, (*path, name))


def with_value(data, number, value):
    """Replace a value in one line of a file."""
    lines = data.splitlines() if data.count(b"\n{") else [data]
    at = number % len(lines)
    tree = json.loads(lines[at])
    places = list(fields_of(tree)) or [()]
    *path, last = places[number // len(lines) % len(places)] or ("new",)
    node = tree
    for name in path:
        node = node[name]
    node[last] = value
    lines[at] = json.dumps(tree).encode()
    return b"\n".join(lines) + b"\n"


def damaged(data, kind, how):
    if kind == "junk":
        return how
    if kind == "cut":
        return data[: int(how * len(data))]
    if kind == "flip":
        place = how % len(data)
        return data[:place] + bytes([data[place] ^ (1 << how % 8)]) + data[place + 1 :]
    if kind == "value":
        return with_value(data, *how)
    return data.rstrip().removesuffix(b"}") + b', "time": ' + json.dumps(how).encode() + b"}\n"


def put(path, kind, how):
    if kind != "place":
        path.write_bytes(damaged(path.read_bytes(), kind, how))
        return
    path.unlink()
    {
        "folder": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
        "loop": lambda: path.symlink_to(path),
        "dangling": lambda: path.symlink_to("nowhere"),
        "absent": lambda: None,
    }[how]()


def lay_out(runs, run):
    folder = runs / run
    (folder / "made").mkdir(parents=True)
    (folder / "config.json").write_text(parse_config({}).model_dump_json())
    uris = {}
    for kind, name, tree in (
        ("evaluation", "metrics.json", {"metrics": {"accuracy": 0.9}, "worst": [{"picture": "a"}]}),
        ("decision", "decision.json", {"decision": "blessed", "rules": [{}], "reasons": ["a"]}),
    ):
        made = folder / "made" / kind
        made.mkdir()
        (made / name).write_text(json.dumps(tree))
        uris[kind] = storage.uri_of(folder / kind / "step-1")
        storage.publish(made, uris[kind], kind=kind)
    gate = {"decision": "blessed", "reasons": ["a"]}
    events = done("train_model", metrics={"global_step": 9})
    events += done("evaluate_model", uri=uris["evaluation"])
    events += done("check_gate", uri=uris["decision"], metrics=gate)
    write(folder, [*events, *promoted(), RunEnd()])
    checkpoints = storage.uri_of(folder / "checkpoints")
    history = History(checkpoints, start=0)
    for step in (3, 6, 9):
        history.add({"global_step": step, "seconds": step / 3, "loss": 0.5})
    fields = {"global_step": 9, "metrics": {"validation_loss": 1.0}}
    uri = storage.join(checkpoints, "step-00000009")
    storage.publish(folder / "made" / "decision", uri, kind="checkpoint", fields=fields)
    Lease(checkpoints, run).acquire()
    (folder / "steps").mkdir()
    record = {"step": "train_model", "status": "done", "began": 1.0, "ended": 2.0}
    (folder / "steps" / "train_model.json").write_text(json.dumps(record))


def register(runs, tmp):
    for name in (MODEL, "other"):
        register_models(storage.uri_of(runs), tmp / name, 2, champions=2, name=name, **LINEAGE)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Create a workdir with two runs and a registry with two models."""
    tmp = tmp_path_factory.mktemp("whole")
    runs = tmp / "runs"
    for run in (WHOLE, DAMAGED):
        lay_out(runs, run)
    register(runs, tmp)
    return runs


def records_of(runs):
    """Return the paths of all records of one run and one model, relative to the workdir."""
    of_run = [path for path in (runs / DAMAGED).rglob("*.json*") if "made" not in path.parts]
    registered = [path for path in (runs / "registry").rglob("*.json") if MODEL in path.parts]
    return sorted(str(path.relative_to(runs)) for path in (*of_run, *registered))


def printed(table):
    """Print a table to a wide terminal; return the output as bytes."""
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue().encode()


def check_run(runs, record):
    states = {each.run_id: each.status for each in control.list_local(runs)}
    assert states[WHOLE] == "blessed"
    if DAMAGED in states:
        printed(closing_table(control.status(DAMAGED, workdir=runs)))
        found = compare((WHOLE, DAMAGED), runs)
        assert found.groups["test"]["accuracy"][0] == 0.9
        json.dumps(found.groups)
    collect(storage.uri_of(runs))
    check_resume(runs, record)


def check_registry(runs):
    root = storage.uri_of(runs)
    found = models.list_models(root=root)
    assert [each.version for each in found if each.name == "other"] == [1, 2]
    for look in (
        lambda: models.show(MODEL, root=root),
        lambda: registry.champion(root, MODEL),
        lambda: registry.newest(root, MODEL),
    ):
        refused_in_one_line(look)


def check_resume(runs, record):
    """Read the records that a resumed run reads before it trains; one-line errors are allowed."""
    checkpoints = storage.uri_of(runs / DAMAGED / "checkpoints")
    if record.name in ("config.json", "events.jsonl"):
        refused_in_one_line(lambda: resume(runs))
    for look in (
        lambda: History(checkpoints, start=9).seconds(),
        lambda: list_checkpoints(checkpoints),
        lambda: Lease(checkpoints, "again").acquire(),
        lambda: read_records(storage.uri_of(runs / DAMAGED)),
    ):
        refused_in_one_line(look)


def resume(runs):
    os.close(local.start(local.RunOptions(workdir=runs, resume=DAMAGED)).lock)


def refused_in_one_line(look):
    try:
        look()
    except UserError as error:
        lines = str(error).splitlines()
    else:
        lines = []
    assert len(lines) <= 1, lines


@pytest.fixture
def attack(template, tmp_path):
    """Return a function that damages one record in a copy of the template and calls its readers."""
    runs = tmp_path / "runs"
    shutil.copytree(template, runs)
    records = records_of(runs)

    def once(number, damage):
        record = Path(records[number % len(records)])
        part = record.parts[0]
        put(runs / record, *damage)
        try:
            check_registry(runs) if part == "registry" else check_run(runs, record)
        finally:
            shutil.rmtree(runs / part)
            shutil.copytree(template / part, runs / part)

    once.records = records
    return once


def suite(examples):
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


@suite(30)
@given(number=st.integers(0, 99), damage=DAMAGES)
def test_a_damaged_record_is_no_traceback_and_hides_no_other(attack, number, damage):
    attack(number, damage)


@pytest.mark.long
@suite(1000)
@given(number=st.integers(0, 99), damage=DAMAGES)
def test_a_thousand_damaged_records(attack, number, damage):
    attack(number, damage)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["folder", "fifo", "loop", "dangling", "absent"])
def test_what_is_in_the_place_of_a_record_hides_no_other(attack, place):
    for number in range(len(attack.records)):
        attack(number, ("place", place))
