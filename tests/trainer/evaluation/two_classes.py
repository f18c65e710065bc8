"""A run of a binary classifier with adjustable skill: dataset, checkpoints and evaluations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.checkpoints import index
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.data.prepare import prepare
from flotilla.trainer.evaluation.evaluate import build_model, evaluate
from flotilla.trainer.evaluation.signature import describe_inputs
from flotilla.trainer.export.export import export
from flotilla.trainer.export.formats import FORMATS, Subject
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.promotion import gate
from flotilla.trainer.tasks import registry as tasks
from flotilla.trainer.tasks.objective import Objective
from tests.trainer.small_run import answering_inside, publish_checkpoint

ROWS = 600


def source(folder: Path, names: tuple[str, str] = ("stays", "leaves"), share: float = 0.2) -> Path:
    """Write a table of customers; those who leave call more often and have a lower weight."""
    random = np.random.default_rng(0)
    leaves = random.random(ROWS) < share
    calls = random.normal(leaves * 1.5, 1)
    lines = [f"{c:.4f},{2 - int(v)},{names[int(v)]}" for c, v in zip(calls, leaves, strict=True)]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "customers.csv"
    path.write_text("\n".join(["calls,weight,status", *lines]) + "\n", encoding="utf-8")
    return path


@dataclass
class TwoClasses:
    """A run below a folder; its model's logit is `slope * calls - 1.5`, with normalized calls."""

    root: Path
    config: Config
    dataset: str

    @classmethod
    def of(cls, root: Path, path: Path, **sections: Any) -> TwoClasses:
        tree = {
            "name": "leavers",
            "data": {"source": str(path), "label": "status", "shards": 2, "weight": "weight"},
            "model": {"name": "tabular", "args": {"hidden_units": [], "pieces": 0}},
            "evaluation": {"baseline": "none"},
            "gate": {"constant": "reported"},
            **sections,
        }
        config = parse_config(tree)
        root.mkdir(parents=True, exist_ok=True)
        uri = prepare(config.data, storage.uri_of(root / "data"), root).uri
        return cls(root=root, config=config, dataset=uri)

    def built(self) -> tuple[DatasetSpec, Objective, keras.Model]:
        """Return the dataset's spec with the positive class set, the objective, and a new model."""
        manifest = storage.read_manifest(self.dataset)
        known = DatasetSpec.from_manifest(manifest, index.learnt_of_dataset(self.dataset))
        spec = tasks.set_positive(self.config.task, known)
        objective = tasks.make_objective(self.config, spec)
        return spec, objective, build_model(self.config, spec, objective)

    def checkpoint(self, slope: float = 1.0) -> str:
        """Publish the checkpoint of a model with this slope, unless it exists; return its URI."""
        known = index.list_checkpoints(storage.uri_of(self.root / f"checkpoints-{slope}"))
        if known:
            return known[0][0]
        _, objective, model = self.built()
        for variable in model.trainable_variables:
            is_kernel = variable.path.endswith("kernel")
            variable.assign(tf.fill(variable.shape, slope if is_kernel else -1.5))
        at = self.root / f"checkpoints-{slope}"
        return publish_checkpoint(at, model, positive=objective.task.labels[1])

    def evaluation(self, checkpoint: str, champion: str = "") -> tuple[str, dict[str, Any]]:
        """Evaluate a checkpoint; return the evaluation's URI and `metrics.json`."""
        uri = storage.uri_of(self.root / f"evaluation-{abs(hash((checkpoint, champion)))}")
        evaluate(self.config, self.dataset, checkpoint, uri, self.root / "scratch", champion)
        return uri, json.loads(storage.read_file(uri, "metrics.json"))

    def model(self, checkpoint: str) -> str:
        """Pass a checkpoint through the gate and export it; return the model's URI."""
        evaluation, _ = self.evaluation(checkpoint)
        decision = gate.check(self.config, evaluation, f"{evaluation}-decision")
        uri = f"{evaluation}-model"
        with answering_inside():
            export(self.config, self.dataset, checkpoint, decision.uri, uri, self.root / "scratch")
        return uri

    def model_of_before(self, weights: list[Any]) -> str:
        """Publish a model with these weights in an earlier version's layout; return its URI."""
        spec, objective, model = self.built()
        for variable, value in zip(model.trainable_variables, weights, strict=True):
            variable.assign(value)
        folder, task = self.root / "before", objective.task
        subject = Subject(model=model, task=task, spec=spec)
        FORMATS["saved_model"].write(subject, folder / "serving", None)
        (folder / "labels.txt").write_text("\n".join(task.labels))
        fields = {"inputs": describe_inputs(spec), "task": task.name, "saved_model": "serving"}
        uri = storage.uri_of(self.root / "model")
        storage.publish(folder, uri, kind="model", fields=fields)
        return uri
