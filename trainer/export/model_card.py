"""Writes the model card (Mitchell et al. 2019) as Markdown, from measured values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from flotilla.trainer import storage
from flotilla.trainer.config.main_metric import MainMetric
from flotilla.trainer.config.program import describe_program
from flotilla.trainer.config.schema import Config
from flotilla.trainer.evaluation.signature import LABELS, SERIALIZED, SERVING, map_outputs
from flotilla.trainer.report import headline, views
from flotilla.trainer.report.wording import (
    NOTHING,
    format_value,
    interval_text,
    round_value,
    spell_metric,
)
from flotilla.trainer.runtime.masking import one_line

_TEMPLATE = "model_card.md.j2"
# Maximum number of class names that the card lists.
_MOST_NAMES = 20


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The configuration, and the URIs of the artifacts that the card describes."""

    config: Config
    dataset: str
    checkpoint: str
    decision: str
    step: int


def write_card(facts: Facts, parity: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """Return the card of a model, as Markdown.

    `parity` is the result of `parity.prove` with the entry `smoke`, and `fields` are the fields of
    the manifest.
    """
    decided = storage.read_json(facts.decision, "decision.json")
    measured = storage.read_json(decided["evaluation"], "metrics.json")
    return template().render(
        config=facts.config,
        program=describe_program(facts.config.model_dump(mode="json")),
        step=facts.step,
        dataset=storage.read_manifest(facts.dataset).fields,
        decided=decided,
        measured=measured,
        metric=MainMetric.of(measured).name,
        headline=_headline(facts.config.name, measured, decided),
        rows=views.metric_rows(measured, measured["metrics"]),
        opponents=[_cell(name) for name in headline.opponents(measured)],
        remarks=views.remarks(measured),
        slices={name: views.weakest(measured, rows) for name, rows in measured["slices"].items()},
        parity=parity,
        fields=fields,
        positives=map_outputs(fields["positive"]),
        thresholds=map_outputs(fields["threshold"]),
    )


def _headline(name: str, measured: Mapping[str, Any], decided: Mapping[str, Any]) -> str:
    # Compute the headline here, because decisions of earlier versions do not contain one.
    facts = {"name": name, "verdict": decided["decision"], "rules": decided["rules"]}
    return headline.headline({**facts, "measured": headline.describe_metric(measured)})


def template() -> jinja2.Template:
    """Return the template of the card, with the filters that it uses."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(
        cell=_cell,
        code=lambda text: " ".join(one_line(str(text)).replace("`", "'").split()),
        formatted=format_value,
        interval=lambda pair: interval_text(pair) or NOTHING,
        number=round_value,
        words=lambda name: _cell(spell_metric(name)),
    )
    made.globals.update(
        labels_file=LABELS, most_names=_MOST_NAMES, serialized=SERIALIZED, serving=SERVING
    )
    return made.get_template(_TEMPLATE)


def _cell(text: object) -> str:
    """Escape text so that it can neither end its table cell nor create a link or tag."""
    plain = " ".join(one_line(str(text)).split()) or "(empty)"
    return "".join(f"\\{letter}" if letter in "\\|`*_[]<>#&" else letter for letter in plain)
