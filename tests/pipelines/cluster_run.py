"""A cluster run in a bucket, whose step bodies run in this process with injected failures."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import uuid4

from flotilla.components.image import MARK_OPTION, own_mark
from flotilla.components.records.step_record import StepRecord, read_records
from flotilla.components.table import find_step
from flotilla.pipelines.replay import OutputArtifact
from flotilla.trainer import storage
from flotilla.trainer.cluster import fitting
from flotilla.trainer.config.form import FIELDS
from tests.stores.fixtures import bucket_name
from tests.stores.s3_server import S3Server
from tests.trainer.small_run import SmallRun

OUTPUTS: Mapping[str, tuple[str, ...]] = {
    "prepare_data": ("configuration", "dataset", "validation", "page"),
    "train_model": ("checkpoint", "mlpipeline_ui_metadata"),
    "evaluate_model": ("evaluation_metrics", "confusion_matrix", "roc_curve", "decision"),
    "export_model": ("model", "registration"),
}
MODULE = "their_code"
CODE = """
import keras


def too_narrow(spec, **_args):
    inputs = keras.Input(spec.shape)
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(inputs)))


def broken_model(spec, **_args):
    units = {"hidden": 10}
    return units["width"]


def broken_loss(labels, outputs):
    raise ValueError("no loss for these labels")


def broken_map(row):
    return {"x": float(row["x"]), "label": row["lable"]}
"""


@dataclass(kw_only=True)
class ClusterRun:
    """The published directories of a small run below a root in a bucket, and its steps."""

    s3: S3Server
    folder: Path
    small: SmallRun
    bucket: str = field(default_factory=bucket_name)
    run_id: str = field(default_factory=lambda: str(uuid4()))
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.s3.create_bucket(self.bucket)
        self.dataset = self._copied(self.small.dataset, "datasets", "digits")
        name = storage.name_of(self.small.checkpoint)
        self.checkpoint = self._copied(self.small.checkpoint, self.run_id, "checkpoints", name)

    @property
    def root(self) -> str:
        return f"s3://{self.bucket}/flotilla"

    def content(self) -> dict[str, bytes]:
        return {key: self.s3.content(self.bucket, key) for key in self.s3.keys(self.bucket)}

    def config(self, **sections: Mapping[str, Any]) -> str:
        tree = self.small.config.model_dump(mode="json")
        for name, section in {**self.settings, **sections}.items():
            tree[name] = {**tree[name], **section}
        return json.dumps(tree)

    def step(self, name: str, /, **arguments: Any) -> StepRecord:
        """Run the body of a step as its pod does; return its record, even after a failure."""
        at = f"s3://{self.bucket}/v2/flotilla-training/{self.run_id}/{name.replace('_', '-')}/1"
        made = {
            each: OutputArtifact(f"{at}/{each}", self.folder / uuid4().hex)
            for each in OUTPUTS[name]
        }
        own = {"root": self.root, "run_id": self.run_id}
        if name == "prepare_data":
            own = {"storage_root": self.root, "kfp_run_id": self.run_id}
        if name == "evaluate_model":
            own["decision_uri"] = str(self.folder / uuid4().hex)
        compiled = mock.patch.object(sys, "argv", ["executor", MARK_OPTION, own_mark()])
        # Skip the trial that runs in parallel with the first step: it takes seconds and has its own
        # tests.
        is_first = name == "prepare_data"
        untried = (
            mock.patch.object(fitting, "try_fit", return_value={}) if is_first else nullcontext()
        )
        with compiled, untried, suppress(SystemExit):
            call = getattr(import_module(f"flotilla.components.{name}"), name).python_func
            call(**{**own, **made, **arguments})
        records = [self.record(each.name) for each in find_step(name).stages]
        return [each for each in records if each][-1]

    def record(self, name: str) -> StepRecord | None:
        at = storage.join(self.root, self.run_id)
        return next((each for each in read_records(at) if each.step == name), None)

    def evaluated(self, **sections: Mapping[str, Any]) -> StepRecord:
        given = {"dataset": self.dataset, "checkpoint": self.checkpoint}
        return self.step("evaluate_model", config=self.config(**sections), **given)

    def exported(self, decision: str, **more: Any) -> StepRecord:
        config = self.config(export={"formats": ["saved_model"]})
        given = {"dataset": self.dataset, "checkpoint": self.checkpoint, "image": "", **more}
        return self.step("export_model", config=config, decision=decision, **given)

    def trained(self, **sections: Mapping[str, Any]) -> StepRecord:
        """Train with a different run ID, which has no checkpoint."""
        pods = {"image": "our/image:1", "store_secret": ""}
        given = {"config": self.config(**sections), "dataset": self.dataset, **pods}
        return self.step("train_model", **given)

    def prepared(self, text: str, **more: Any) -> StepRecord:
        self.s3.replace(self.bucket, "raw/rows.csv", text.encode())
        values = {each.name: each.default for each in FIELDS}
        values |= {"source": f"s3://{self.bucket}/raw/rows.csv", "label": "label", **more}
        return self.step("prepare_data", **{**values, "storage_root": self.root})

    def damage(self, uri: str, name: str, content: bytes = b"damaged") -> None:
        key = uri.removeprefix(f"s3://{self.bucket}/")
        self.s3.replace(self.bucket, f"{key}/{name}", content)

    def _copied(self, uri: str, *names: str) -> str:
        copy = self.folder / uuid4().hex
        manifest = storage.fetch(uri, copy)
        target = storage.join(self.root, *names)
        storage.publish(copy, target, kind=manifest.kind, fields=manifest.fields)
        return target


Plant = Callable[[ClusterRun], StepRecord]
ROWS = "x,label\n" + "".join(f"{number}.5,{'ab'[number % 2]}\n" for number in range(60))


def _own(name: str) -> dict[str, str]:
    return {"name": f"{MODULE}:{name}", "args": {}}


def _damaged_shard(run: ClusterRun) -> StepRecord:
    run.damage(run.dataset, "test-00001-of-00003.tfrecord")
    return run.evaluated()


def _refused_model(run: ClusterRun) -> StepRecord:
    return run.evaluated(gate={"min": {"accuracy": 0.99999}, "max": {}})


def _prepared(**data: str) -> Plant:
    return lambda run: run.prepared(ROWS, settings={"data": data})


PLANTS: Mapping[str, Plant] = {
    "data: no such column": lambda run: run.prepared(ROWS, label="price"),
    "data: no schema": lambda run: _prepared(schema_file=f"s3://{run.bucket}/schema.yaml")(run),
    "model: too few outputs": lambda run: run.trained(
        model=_own("too_narrow"), cluster={"launcher": "jobset"}
    ),
    "loss: raises": lambda run: run.trained(
        task={"loss": f"{MODULE}:broken_loss"}, cluster={"launcher": "jobset"}
    ),
    "storage: a shard is damaged": _damaged_shard,
    "gate: refused": _refused_model,
    "export: not blessed": lambda run: run.exported(_refused_model(run).uri),
    "own code: a map": _prepared(map=f"{MODULE}:broken_map"),
    "own code: a model": lambda run: run.evaluated(model=_own("broken_model")),
    "configuration: too many workers": lambda run: run.prepared(
        ROWS, workers=99, settings={"data": {"shards": 3}}
    ),
}


def write_code(folder: Path) -> None:
    (folder / f"{MODULE}.py").write_text(CODE, encoding="utf-8")
    os.chdir(folder)
