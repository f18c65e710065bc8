"""The model card (Mitchell et al. 2019): Markdown, from what was measured and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer import storage
from trainer.config.schema import Config
from trainer.evaluation.signature import LABELS, SERIALIZED, SERVING
from trainer.report import views
from trainer.report.wording import formatted

# Of the names of classes, what a reader has to know.
_MOST_NAMES = 20
# Four decimals of a larger number tell nothing more.
_LARGE = 100


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Where all that the card says is published."""

    config: Config
    dataset: str
    checkpoint: str
    decision: str
    step: int


def written(facts: Facts, parity: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """Return the card of a model, as Markdown.

    `parity` is what `parity.prove` returns, with `smoke`; `fields` are those of the
    manifest.
    """
    decided = json.loads(storage.read_file(facts.decision, "decision.json"))
    measured = json.loads(storage.read_file(decided["evaluation"], "metrics.json"))
    parts = [
        _head(facts, measured),
        _use(facts.config.name, fields, measured.get("labels") or []),
        _data(facts),
        _training(facts),
        _metrics(measured),
        _classes(measured),
        *map(_own_table, measured.get("tables") or ()),
        *(_slice(name, rows, measured) for name, rows in measured["slices"].items()),
        _gate(decided),
        _forms(parity),
        _unknown(measured),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(facts: Facts, measured: Mapping[str, Any]) -> str:
    config = facts.config
    metric, classes = views.main_metric(measured), len(measured.get("labels") or ())
    of_classes = f" of {classes} classes" if classes else ""
    value = measured["metrics"].get(metric)
    return (
        f"# {_cell(config.name)}\n\n"
        f"A `{_code(config.model.name)}` model for {_words(measured['task'])}{of_classes}, trained "
        f"on `{_code(config.data.name)}`; global step {facts.step}. "
        f"{_words(metric).capitalize()} {_number(value)} on {measured['examples']} test examples."
    )


def _use(name: str, fields: Mapping[str, Any], labels: Sequence[str]) -> str:
    takes, gives = (
        [
            [f"`{each['name']}`", each["dtype"], f"({', '.join(map(str, ['n', *each['shape']]))})"]
            for each in fields[side]
        ]
        for side in ("inputs", "outputs")
    )
    classes = f"Classes are in the order of `{LABELS}`: {_names(labels)}.\n\n" if labels else ""
    for output, names in fields["labels"].items():
        classes += f"Classes of {_cell(output)}: {_names(names)}.\n\n" if names else ""
    return (
        "## How to ask it\n\n"
        f"Signature `{SERVING}` takes\n\n{_table(['input', 'type', 'shape'], takes)}\n\n"
        f"and `{SERIALIZED}` takes `examples`: serialized `tf.train.Example` records as the "
        "dataset stores them. Both give\n\n"
        f"{_table(['answer', 'type', 'shape'], gives)}\n\n{classes}"
        "    tensorflow_model_server --rest_api_port=8501 "
        f"--model_name={name} --model_base_path=$PWD/serving/{name}\n"
        f"    curl -d @request.json localhost:8501/v1/models/{name}:predict"
    )


def _names(labels: Sequence[str]) -> str:
    names = ", ".join(map(_cell, labels[:_MOST_NAMES]))
    return names + (", ..." if len(labels) > _MOST_NAMES else "")


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
        f"{training.optimizer.learning_rate:g}. All settings are in `config.json`.{_bundle(facts)}"
    )


def _bundle(facts: Facts) -> str:
    code = facts.config.code
    return f"\n\nThe user's own modules are those of the bundle `{_code(code)}`." if code else ""


def _metrics(measured: Mapping[str, Any]) -> str:
    intervals = measured["intervals"]
    rows = (
        [_cell(name), _number(value), _interval(intervals.get(name))]
        for name, value in measured["metrics"].items()
    )
    return f"## Measured on the test split\n\n{_table(['figure', 'value', '95 % interval'], rows)}"


def _classes(measured: Mapping[str, Any]) -> str:
    if not measured.get("per_class"):
        return ""
    names = ("precision", "recall", "f1", "support")
    rows = (
        [_cell(each["label"]), *(_number(each[name]) for name in names)]
        for each in measured["per_class"]
    )
    return f"### By class\n\n{_table(['class', *names], rows)}"


def _own_table(table: Mapping[str, Any]) -> str:
    rows = ([_cell(formatted(cell)) for cell in row] for row in table["rows"])
    return f"### {_cell(table['title'])}\n\n{_table([*map(_cell, table['columns'])], rows)}"


def _slice(name: str, rows: Sequence[Mapping[str, Any]], measured: Mapping[str, Any]) -> str:
    cells = [
        [
            _cell(row["value"]),
            str(row["examples"]),
            _number(row["metric"]),
            _interval(row["interval"]),
        ]
        for row in views.weakest(measured, rows)
    ]
    if not cells:
        return ""
    metric = _words(views.main_metric(measured))
    table = _table(["part", "examples", metric, "95 % interval"], cells)
    return f"### Where it is weakest, by {_cell(name)}\n\n{table}"


def _gate(decided: Mapping[str, Any]) -> str:
    lines = "\n".join(f"- {_cell(reason)}" for reason in decided["reasons"])
    return f"## The gate: {decided['decision']}\n\n{lines}"


def _forms(parity: Mapping[str, Any]) -> str:
    rows = (
        [
            f"`{name}`",
            f"{each['max_difference']:.3g}",
            f"{_words(each['metric'])} {_number(each['value'])}" if "metric" in each else "-",
        ]
        for name, each in parity["formats"].items()
    )
    return (
        "## Forms\n\nHeld against the original in memory on "
        f"{parity['examples']} test examples.\n\n"
        f"{_table(['form', 'largest difference', 'where it is rounded'], rows)}\n\n"
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


def _words(name: str) -> str:
    return _cell(name.replace("_", " "))


def _code(text: str) -> str:
    return " ".join(text.replace("`", "'").split())


def _number(value: float | int | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= _LARGE:
        return f"{value:.6g}"
    return f"{value:.4f}"


def _interval(pair: Sequence[float] | None) -> str:
    return f"{_number(pair[0])} to {_number(pair[1])}" if pair else "-"
