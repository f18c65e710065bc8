"""Tests that records with wrong types or missing fields cause one-line errors, not tracebacks."""

import gzip
import json
import shutil
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla.trainer import storage
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.data.listing import Listing
from flotilla.trainer.events import Event
from flotilla.trainer.events import parse as parse_event
from flotilla.trainer.events import to_tree as event_tree
from flotilla.trainer.export import export
from flotilla.trainer.features.dataset_spec import SCHEMA, DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.promotion import gate, registration, registry
from flotilla.trainer.storage import Manifest
from tests.pipelines.test_damaged_records import VALUES, refused_in_one_line, suite, with_value
from tests.trainer.promotion.test_registration import Run

ODD = st.sampled_from(
    [None, "²3", "2026-13-01", "", [], {}, [[]], {"a": []}, True, -1, 1.5, 10**30, "\x1b[2J"]
)  # fmt: skip
PAIRED = {
    "metric": "accuracy", "bound": 0.01, "better": "higher", "difference": 0.02,
    "confidence": 0.95, "examples": 99, "variance": 0.1,
}  # fmt: skip
MEASURED = {
    "metrics": {"accuracy": 0.9, "loss": 0.3}, "main_metric": "accuracy", "better": "higher",
    "global_step": 9, "labels": ["a", "b"], "intervals": {"accuracy": [0.8, 0.95]},
    "slices": {"color": [{"value": "red", "examples": 9, "metrics": {"accuracy": 0.9}}]},
    "threshold": {"value": 0.5}, "outputs": {"y": {"threshold": {"value": 0.25}}},
    "constant": {
        "answer": "a", "metrics": {"accuracy": 0.5},
        "paired": {**PAIRED, "bound": 0.3, "constant": 0.5, "difference": 0.4},
    },
    "champion": {
        "uri": "file:///v/1", "incomparable": "", "metrics": {"accuracy": 0.88}, "paired": PAIRED,
    },
}  # fmt: skip
RULE = {"metric": "accuracy", "bound": "min", "threshold": 0.5, "value": 0.9, "key": "k"}
DECIDED = {
    "decision": "blessed", "reasons": ["a"], "rules": [RULE], "evaluation": "file:///nowhere",
    "measured": {"metric": "accuracy", "value": 0.9, "better": "higher"},
}  # fmt: skip
REGISTERED = {
    "decision": "promoted", "headline": "h", "reasons": ["a"], "rules": [{}], "version": 1,
    "promotion": 1,
}  # fmt: skip
FEATURE = FeatureSpec(shape=(2,), dtype="float32", stored="raw")
DATASET = {
    "dataset_schema": SCHEMA, "block_rows": 512,
    "features": {"x": asdict(FEATURE), "y": asdict(FEATURE)},
    "inputs": ["x"], "targets": ["y"], "weight": "", "group": "", "target_counts": {},
    "target_moments": {}, "splits": {"train": {"examples": 2, "shards": [2]}},
}  # fmt: skip
LISTING = {
    "schema": 1, "root": "file:///data", "roots": ["file:///data"],
    "files": [[0, "a.csv", 9, "t", "", ""]], "hidden": {"b": "c"},
}  # fmt: skip


def published(folder, name, tree, **fields):
    made = folder / "made"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    (made / name).write_text(json.dumps(tree))
    uri = storage.uri_of(folder / "published")
    storage.delete(uri)
    kind = {"metrics.json": "evaluation", "decision.json": "decision"}.get(name, "registration")
    storage.publish(made, uri, kind=kind, fields=fields)
    return uri


def of_gate(folder, tree):
    evaluation, output = published(folder, "metrics.json", tree), storage.uri_of(folder / "out")
    storage.delete(output)
    rules = {"min": {"accuracy": 0.5, "accuracy@color=red": 0.5}, "max": {"loss": 1.0}}
    refused_in_one_line(lambda: gate.check(parse_config({"gate": rules}), evaluation, output))
    refused_in_one_line(lambda: export._thresholds(evaluation))


def of_decision(folder, tree):
    uri = published(folder, "decision.json", tree)
    refused_in_one_line(lambda: export._require_blessed(uri, {"dataset": "d"}))
    refused_in_one_line(lambda: registration._read_decision(uri))


def of_registration(folder, tree):
    uri = published(folder, "registration.json", tree)
    refused_in_one_line(lambda: registration._read(uri))


def of_dataset(_folder, tree):
    head = {"schema": 1, "kind": "dataset", "created": "2026-01-01T00:00:00Z", "files": []}
    text = json.dumps({**tree, **head})

    def look():
        DatasetSpec.from_manifest(Manifest.from_json(text)).examples("train")

    refused_in_one_line(look)


def of_listing(_folder, tree):
    data = gzip.compress(json.dumps(tree).encode())
    refused_in_one_line(lambda: Listing.from_json(data, "here"))


RECORDS = {
    "evaluation": (of_gate, MEASURED),
    "decision": (of_decision, DECIDED),
    "registration": (of_registration, REGISTERED),
    "dataset": (of_dataset, DATASET),
    "listing": (of_listing, LISTING),
}


def changed(tree, number, value):
    """Return the record with one value replaced, or removed if `value` is "absent"."""
    text = json.dumps(tree).encode()
    if value != "absent":
        found = json.loads(with_value(text, number, value))
        return found if isinstance(found, dict) else {}
    marked = json.loads(with_value(text, number, "of no field"))
    return json.loads(json.dumps(marked), object_pairs_hook=lambda pairs: {
        name: each for name, each in pairs if each != "of no field"
    })  # fmt: skip


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_with_odd_fields_is_one_line(tmp_path, kind):
    look, tree = RECORDS[kind]
    look(tmp_path, tree)

    @suite(50)
    @given(number=st.integers(0, 99), value=ODD | VALUES | st.just("absent"))
    def attack(number, value):
        look(tmp_path, changed(tree, number, value))

    attack()


@pytest.mark.parametrize("what", ["champion", "model"])
def test_the_manifest_of_a_model_with_odd_fields_is_one_line(tmp_path, what):
    run = Run(tmp_path)
    first = run.exported(1)
    assert run.register(first).promoted
    champion = run.champion()
    model = run.exported(2, champion=champion.uri)
    home = storage.local_path(champion.uri if what == "champion" else model)
    whole = (home / "MANIFEST.json").read_bytes()

    @suite(50)
    @given(number=st.integers(0, 99), value=ODD | VALUES | st.just("absent"))
    def attack(number, value):
        (home / "MANIFEST.json").write_text(json.dumps(changed(json.loads(whole), number, value)))
        storage.delete(f"{model}-registration-0")
        for look in (
            lambda: run.register(model),
            lambda: registry.champion_positive(run.root, "digits"),
            lambda: registry.champion_checkpoint(run.root, "digits"),
        ):
            refused_in_one_line(look)

    attack()


@suite(100)
@given(data=st.data())
def test_an_event_with_odd_fields_is_none_or_whole(data):
    kind = data.draw(st.sampled_from(Event.__subclasses__()))
    names = [*kind.__dataclass_fields__]
    tree = {"event": "step_end", "time": 1.0, **{n: data.draw(ODD | VALUES) for n in names}}
    found = parse_event(json.dumps(tree))
    assert found is None or json.dumps(event_tree(found))
