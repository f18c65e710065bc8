"""Contamination of the test split: how many test examples the model was trained on.

Examples are compared by the hashes of their inputs, which each dataset stores. If there are more
than 65,536 distinct hashes, the dataset stores the smallest ones, which are a uniform sample. If a
model was warm-started, the data that its initial weights were trained on counts too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataGateConfig
from flotilla.trainer.data_gate.leaks import Copies, count_shared, find_copies, find_new_copies
from flotilla.trainer.data_gate.profile import DatasetProfile, SplitProfile, make_profile
from flotilla.trainer.report.wording import round_value, spell_metric
from flotilla.trainer.runtime.errors import UserError

_TRAIN, _TEST = "train", "test"
_GENERATIONS = 20


@dataclass(frozen=True, kw_only=True)
class Judges:
    """The test examples of a dataset, and the limits for reporting contamination."""

    dataset: DatasetProfile
    limits: DataGateConfig

    @classmethod
    def load(cls, uri: str, limits: DataGateConfig) -> Judges | None:
        """Load the hashes of the dataset at a URI, or return None if the dataset has none."""
        try:
            return cls(dataset=make_profile(uri), limits=limits)
        except storage.Missing:
            return None

    def remarks(self, checkpoint: str) -> list[str]:
        """Return remarks on why a checkpoint's metrics on this dataset may be too good."""
        fields, lines = _read_fields(checkpoint), []
        test, train = (self.dataset.splits[split] for split in (_TEST, _TRAIN))
        significance, leakage = map(self.limits.limit, ("significance", "leakage"))
        if found := find_copies(self.dataset, test, train, significance, leakage):
            lines.append(
                f"{found} are also in the training split, so the metrics are too optimistic; split "
                "by data.group, or remove the copies"
            )
        if found := self._find_trained(_profiles(_list_earlier_datasets(fields))):
            lines.append(
                f"{found} were in the training data of the weights that training began with "
                f"({fields['warmed_from']}), so the metrics are too optimistic; keep data.seed and "
                "data.splits, or remove training.warm_start"
            )
        return lines

    def _find_trained(self, datasets: Iterable[DatasetProfile]) -> Copies | None:
        known = _merge(each.splits[_TRAIN] for each in datasets)
        significance = self.limits.limit("significance")
        return find_new_copies(self.dataset, known, significance) if known else None

    def judge_champion(self, uri: str, metric: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the champion's original results as `own`, and `remarks` on them.

        `metric` is the compared metric, and `metrics` are the champion's results on these examples.
        """
        manifest = storage.read_manifest(uri)
        fields, lineage = manifest.fields, manifest.fields.get("lineage", {})
        own: dict[str, Any] = {"date": manifest.created[:10], "metrics": lineage.get("metrics", {})}
        uri = str(fields.get("made_from", {}).get("dataset", ""))
        if (there := _read_profile(uri)) is None:
            line = (
                f"The champion's dataset {uri} cannot be read, so the champion may have been "
                "trained on these test examples"
            )
            return {"own": own, "remarks": [line]}
        own |= {"examples": there.examples(_TEST), "spans": list(there.spans)}
        checkpoint = str(fields.get("made_from", {}).get("checkpoint", ""))
        before = _profiles(_list_earlier_datasets(lineage or _read_fields(checkpoint)))
        remarks = []
        if found := self._find_trained([there, *before]):
            remarks.append(
                f"{found} were in the champion's training split, so its metrics are too optimistic "
                "and the comparison is unfair; keep data.seed and data.splits, or give this model "
                "another name"
            )
        if _TEST in there.splits:
            asked, shared = count_shared(there.splits[_TEST], self.dataset.splits[_TEST])
            if 2 * shared < asked:
                remarks.append(self._compare_test_sets(own, metric, metrics.get(metric)))
        return {"own": own, "remarks": remarks}

    def _compare_test_sets(self, own: Mapping[str, Any], metric: str, now: Any) -> str:
        there = _describe(own["examples"], own["spans"])
        here = _describe(self.dataset.examples(_TEST), self.dataset.spans)
        value = own["metrics"].get(metric)
        line = (
            f"The champion's own run of {own['date']} used other test examples ({there}) than this "
            f"run ({here})"
        )
        if value is None or now is None:
            return line
        return f"{line}: {spell_metric(metric)} {round_value(value)} there, {round_value(now)} here"


def _describe(examples: int, spans: Iterable[str]) -> str:
    first, *others = [*spans] or [""]
    of = f" of {first}{f' to {others[-1]}' if others else ''}" if first else ""
    return f"{examples}{of}"


def _list_earlier_datasets(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the known datasets that a checkpoint's initial weights were trained on."""
    for _ in range(_GENERATIONS):
        fields = _read_fields(str(fields.get("warmed_from", "")))
        if dataset := str(fields.get("dataset", "")):
            yield dataset


def _read_fields(checkpoint: str) -> Mapping[str, Any]:
    try:
        return storage.read_manifest(checkpoint).fields if checkpoint else {}
    except storage.Unavailable:
        raise
    except UserError:
        # The checkpoint may have been deleted, and a Keras file has no manifest.
        return {}


def _profiles(uris: Iterable[str]) -> Iterator[DatasetProfile]:
    return filter(None, map(_read_profile, dict.fromkeys(uris)))


def _read_profile(uri: str) -> DatasetProfile | None:
    try:
        return make_profile(uri)
    except storage.Unavailable:
        raise
    except UserError:
        return None


def _merge(splits: Iterable[SplitProfile]) -> SplitProfile | None:
    """Merge the hashes of several splits. Keep only those in the range that all splits cover."""
    found = list(splits)
    if len(found) <= 1:
        return found[0] if found else None
    bounds = [each.hashes.max() for each in found if not each.is_whole and len(each.hashes)]
    hashes, places = np.unique(np.concatenate([each.hashes for each in found]), return_inverse=True)
    copies = np.zeros(len(hashes), np.int64)
    # Take the maximum, because an example in several splits does not count as a copy.
    np.maximum.at(copies, places, np.concatenate([each.copies for each in found]))
    within = hashes <= min(bounds) if bounds else np.ones(len(hashes), np.bool_)
    return SplitProfile(
        examples=sum(each.examples for each in found),
        hashes=hashes[within],
        copies=copies[within],
        is_whole=not bounds,
    )
