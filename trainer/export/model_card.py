"""The model card (Mitchell et al. 2019): Markdown, from what was measured and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer import storage
from trainer.config.schema import Config
from trainer.evaluation.signature import SERIALIZED, SERVING

# Of the parts of a slice, and of the names of classes, what a reader has to know.
_MOST_PARTS = 10
_MOST_NAMES = 20


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Where all that the card says is published."""

    config: Config
    dataset: str
    checkpoint: str
    decision: str
    step: int


def written(facts: Facts, parity: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]]) -> str:
    """Return the card of a model, as Markdown.

    `parity` is what `parity.prove` returns, with `smoke`; `inputs` are those of the manifest.
    """
    decided = json.loads(storage.read_file(facts.decision, "decision.json"))
    measured = json.loads(storage.read_file(decided["evaluation"], "metrics.json"))
    parts = [
        _head(facts, measured),
        _use(facts.config.name, inputs, measured["labels"]),
        _data(facts),
        _training(facts),
        _metrics(measured),
        _classes(measured),
        *(_slice(name, rows) for name, rows in measured["slices"].items()),
        _gate(decided),
        _forms(parity),
        _unknown(measured),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(facts: Facts, measured: Mapping[str, Any]) -> str:
    config = facts.config
    return (
        f"# {_cell(config.name)}\n\n"
        f"A `{_code(config.model.name)}` classifier of {len(measured['labels'])} classes, trained "
        f"on `{_code(config.data.dataset)}`; global step {facts.step}. Accuracy "
        f"{_number(measured['metrics']['accuracy'])} on {measured['examples']} test examples."
    )


def _use(name: str, inputs: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> str:
    rows = (
        [f"`{each['name']}`", each["dtype"], f"({', '.join(map(str, ['n', *each['shape']]))})"]
        for each in inputs
    )
    names = ", ".join(map(_cell, labels[:_MOST_NAMES]))
    names += ", ..." if len(labels) > _MOST_NAMES else ""
    return (
        "## How to ask it\n\n"
        f"Signature `{SERVING}` takes\n\n{_table(['input', 'type', 'shape'], rows)}\n\n"
        f"and `{SERIALIZED}` takes `examples`: serialized `tf.train.Example` records as the "
        "dataset stores them. Both give `logits` and `probabilities`, one column a class in the "
        f"order of `labels.txt`: {names}.\n\n"
        "    tensorflow_model_server --rest_api_port=8501 "
        f"--model_name={name} --model_base_path=$PWD/serving/{name}\n"
        f"    curl -d @request.json localhost:8501/v1/models/{name}:predict"
    )


def _data(facts: Facts) -> str:
    fields = storage.read_manifest(facts.dataset).fields
    rows = ([split, str(each["examples"])] for split, each in fields["splits"].items())
    return (
        "## Data\n\n"
        f"`{_code(str(fields.get('dataset', '')))}` {_cell(str(fields.get('version', '')))}, "
        f"fingerprint `{fields['fingerprint']}`.\n\n{_table(['split', 'examples'], rows)}"
    )


def _training(facts: Facts) -> str:
    training = facts.config.training
    return (
        "## Training\n\n"
        f"Strategy `{_code(training.strategy)}`, {facts.step} global steps of "
        f"{training.batch_size} examples a replica, `{training.optimizer.name}` with learning rate "
        f"{training.optimizer.learning_rate:g}. All settings are in `config.json`."
    )


def _metrics(measured: Mapping[str, Any]) -> str:
    intervals = measured["intervals"]
    rows = (
        [name, _number(value), _interval(intervals.get(name))]
        for name, value in measured["metrics"].items()
    )
    return f"## Measured on the test split\n\n{_table(['figure', 'value', '95 % interval'], rows)}"


def _classes(measured: Mapping[str, Any]) -> str:
    names = ("precision", "recall", "f1", "support")
    rows = (
        [_cell(each["label"]), *(_number(each[name]) for name in names)]
        for each in measured["per_class"]
    )
    return f"### By class\n\n{_table(['class', *names], rows)}"


def _slice(name: str, rows: Iterable[Mapping[str, Any]]) -> str:
    worst = sorted(rows, key=lambda row: row["metrics"]["accuracy"])[:_MOST_PARTS]
    cells = (
        [
            _cell(row["value"]),
            str(row["examples"]),
            _number(row["metrics"]["accuracy"]),
            _interval(row["intervals"]["accuracy"]),
        ]
        for row in worst
    )
    table = _table(["part", "examples", "accuracy", "95 % interval"], cells)
    return f"### Where it is weakest, by {_cell(name)}\n\n{table}"


def _gate(decided: Mapping[str, Any]) -> str:
    lines = "\n".join(f"- {_cell(reason)}" for reason in decided["reasons"])
    return f"## The gate: {decided['decision']}\n\n{lines}"


def _forms(parity: Mapping[str, Any]) -> str:
    rows = (
        [f"`{name}`", f"{each['max_difference']:.3g}", _number(each.get("accuracy"))]
        for name, each in parity["formats"].items()
    )
    return (
        "## Forms\n\nHeld against the original in memory on "
        f"{parity['examples']} test examples.\n\n"
        f"{_table(['form', 'largest difference', 'accuracy, where rounded'], rows)}\n\n"
        f"A fresh process on the exporting machine answered one example in "
        f"{parity['smoke']['milliseconds']:g} ms."
    )


def _unknown(measured: Mapping[str, Any]) -> str:
    return (
        "## What is not known\n\n"
        f"Nothing was measured on other data than this test split of {measured['examples']} "
        "examples, and nothing but the parts above. Examples unlike the training data get an "
        "answer as sure as any other."
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head, *lines = (f"| {' | '.join(row)} |" for row in (heads, *rows))
    return "\n".join([head, f"|{'---|' * len(heads)}", *lines])


def _cell(text: str) -> str:
    """Return a text that cannot leave its cell, nor become a link or a tag."""
    plain = " ".join(text.split()) or "(empty)"
    return "".join(f"\\{letter}" if letter in "\\|`*_[]<>#&" else letter for letter in plain)


def _code(text: str) -> str:
    return " ".join(text.replace("`", "'").split())


def _number(value: float | int | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4f}"


def _interval(pair: Sequence[float] | None) -> str:
    return f"{pair[0]:.4f} to {pair[1]:.4f}" if pair else "-"
