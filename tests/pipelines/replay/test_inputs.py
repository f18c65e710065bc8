"""What a step reads: as it was, counted before it is fetched, named where it is gone."""

import json
import shutil
from types import SimpleNamespace

import pytest

from components.records.given import Given
from components.records.step_record import StepRecord
from pipelines.replay import inputs
from pipelines.replay.recorded import RecordedStep
from tests.pipelines.replay.gate_run import RUN, evaluation_at, gated, published
from trainer import mirror, storage
from trainer.code import bundle
from trainer.config.load import parse_config
from trainer.errors import UserError
from trainer.promotion import registry

TEXT = parse_config({}).model_dump_json()


@pytest.fixture
def root(tmp_path):
    return storage.uri_of(tmp_path / "root")


def step_of(root, name, *, began=None, record=None, **arguments):
    record = record or StepRecord(step=name, status="failed", error="it failed", began=began)
    arguments = {"config": TEXT, "root": root, **arguments}
    said = Given(step=name, began=0.0, version="0.1", arguments=arguments)
    return RecordedStep(run_id=RUN, record=record, given=said, root=root, source=root)


def found(step):
    return inputs.inputs_of(step, inputs.snapshot_of(step))


def test_they_are_fetched_and_counted(root, tmp_path):
    evaluation = evaluation_at(tmp_path, root)
    record = gated(tmp_path, root, evaluation, min={"accuracy": 0.95})
    step = step_of(root, "check_gate", record=record, evaluation=evaluation)
    ((one,), remarks) = found(step)
    assert (one.name, one.uri, remarks) == ("evaluation", evaluation, [])
    size = inputs.fetch([one], tmp_path, inputs.snapshot_of(step))
    copy = tmp_path / mirror.STORAGE / RUN / "evaluation" / "step-7"
    assert size == one.bytes == (copy / "metrics.json").stat().st_size
    assert (copy / "MANIFEST.json").is_file()


def test_one_that_was_deleted_is_named(root, tmp_path):
    evaluation = evaluation_at(tmp_path, root)
    storage.delete(evaluation)
    step = step_of(root, "check_gate", began=1.0, evaluation=evaluation)
    with pytest.raises(UserError, match="the evaluation of check_gate is not there as it was") as e:
        found(step)
    assert evaluation in str(e.value)
    # Where the step has failed for this, it fails for it again.
    record = StepRecord(step="check_gate", status="failed", error=f"no {evaluation}", began=1.0)
    nothing, (remark,) = found(step_of(root, "check_gate", record=record, evaluation=evaluation))
    assert nothing == []
    assert remark.startswith("the evaluation is as the step has found it")


@pytest.mark.parametrize("by", ["config", "code", "data_code"])
def test_the_bundle_of_its_modules_is_one_of_them(root, tmp_path, by):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "blocks.py").write_text("A = 1\n")
    uri = bundle.publish(tmp_path / "mine", root).uri
    given = uri if by != "config" else parse_config({"code": uri}).model_dump_json()
    # It was published by a machine whose clock is late: after the step has begun.
    step = step_of(root, "prepare_data", began=1.0, **{by: given})
    ((one,), remarks) = found(step)
    assert (one.name, one.uri, remarks) == ("code", uri, [])
    inputs.fetch([one], tmp_path, inputs.snapshot_of(step))
    copy = tmp_path / mirror.STORAGE / "code" / storage.name_of(uri)
    assert (copy / "blocks.py").read_text() == "A = 1\n"
    storage.delete(uri)
    with pytest.raises(UserError, match="the code of prepare_data is not there as it was"):
        found(step)


def test_a_configuration_of_another_version(root):
    tree = {**json.loads(TEXT), "fleet": {}}
    with pytest.raises(UserError, match=r"Flotilla 0\.1, .* fleet.* with the version of the run"):
        found(step_of(root, "train_model", began=1.0, config=json.dumps(tree)))


def test_a_disk_that_is_too_small(root, tmp_path, monkeypatch):
    evaluation = evaluation_at(tmp_path, root)
    ones, _ = found(step_of(root, "check_gate", began=1.0, evaluation=evaluation))
    inputs.require_room(ones, tmp_path, is_local=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=9 << 20))
    with pytest.raises(UserError, match=r"the inputs need 64 MB, and .* has 9 MB free") as e:
        inputs.require_room(ones, tmp_path, is_local=True)
    # It is below the workdir, and is found in no other.
    assert str(e.value).endswith("free some space")


def test_the_champion_is_the_one_of_that_time(root, tmp_path):
    uris = []
    for number, created in ((1, "2026-03-01T00:00:00.000Z"), (2, "2026-03-02T00:00:00.000Z")):
        at = storage.join(registry.home(root, "model"), "versions", f"{number:06d}")
        published(tmp_path, at, "model", {"a.json": number}, version=number)
        uris.append(at)
        made = storage.join(registry.home(root, "model"), "promotions", f"1{number:05d}")
        fields = {"version": number, "predecessor": number - 1, "restores": 0, "by": "a person"}
        published(tmp_path, made, "promotion", {"promotion.json": number}, **fields)
        uri = storage.join(made, "MANIFEST.json")
        tree = {**json.loads(storage.read_bytes(uri)), "created": created}
        storage.write_bytes(uri, json.dumps(tree).encode())

    def champion(began):
        text = parse_config({"name": "model"}).model_dump_json()
        ones, _ = found(step_of(root, "evaluate_model", began=began, config=text))
        return [each.uri for each in ones if each.name == "champion"]

    assert champion(1772280000.0) == []  # 2026-02-28
    assert champion(1772366400.0) == uris[:1]  # 2026-03-01, at noon
    assert champion(1772539200.0) == uris[1:]  # 2026-03-03


def test_training_begins_where_its_last_attempt_has_begun(root, tmp_path):
    for number, created in ((100, "2026-03-01T00:00:10.000Z"), (200, "2026-03-01T00:01:10.000Z")):
        uri = storage.join(root, RUN, "checkpoints", f"step-{number}")
        published(tmp_path, uri, "checkpoint", {"a.json": 1}, global_step=number)
        place = storage.join(uri, "MANIFEST.json")
        tree = {**json.loads(storage.read_bytes(place)), "created": created}
        storage.write_bytes(place, json.dumps(tree).encode())

    def first(**restart):
        incidents = ({"event": "restart", **restart},) if restart else ()
        record = StepRecord(
            step="train_model", status="failed", began=1772323200.0, incidents=incidents
        )
        ones, _ = found(step_of(root, "train_model", record=record))
        return [storage.name_of(each.uri) for each in ones]

    assert first() == []
    assert first(task="chief-0", time=1772323230.0) == ["step-100"]
    assert first(task="chief-0", time=1772323290.0) == ["step-200"]
    # One that did not lead has begun again in the midst of an attempt.
    assert first(task="worker-0", time=1772323290.0) == []
