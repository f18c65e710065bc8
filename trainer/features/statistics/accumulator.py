"""One pass over the examples of a split, which collects the content of `statistics.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.statistics.association import measure_association
from flotilla.trainer.features.statistics.hashing import comparable_content, hashes
from flotilla.trainer.features.statistics.one_pass import BoundedCounter, Moments
from flotilla.trainer.features.statistics.sampling import MOST_EXAMPLES, Hashes, Sample
from flotilla.trainer.features.statistics.statistics import (
    CLASS,
    IMAGE,
    NUMBER,
    TENSOR,
    TEXT,
    ExampleSketch,
    FeatureStatistics,
    SplitStatistics,
)

# Number of quantiles of a number.
STEPS = 1000
# Hash seed for examples; a different one than for the draw of splits.
_SALT = 0x5EED
_PROJECTIONS = 4
# Elements of longer vectors are not treated as columns.
_LONGEST = 4096
# Hashes of values: for all numbers together, and at least for each.
_MOST_VALUES, _LEAST_VALUES = 1 << 20, 1 << 10
# The punctuation that Keras's TextVectorization strips, and the separators of words.
PUNCTUATION = r"[!\"#$%&()*+,\-./:;<=>?@\[\\\]^_`{|}~']"
_PUNCTUATION = re.compile(PUNCTUATION.encode())
#: Letters of scripts without spaces: Thai, Lao, Burmese, Khmer, kana, Chinese.
LETTERS = (
    ("\u0e00", "\u0eff"), ("\u1000", "\u109f"), ("\u1780", "\u17ff"), ("\u3040", "\u30ff"),
    ("\u3400", "\u9fff"), ("\uf900", "\ufaff"), ("\U00020000", "\U0003ffff"),
)  # fmt: skip
_LETTER = re.compile(f"([{''.join(f'{first}-{last}' for first, last in LETTERS)}])")


def find_kind(feature: FeatureSpec) -> str:
    """Return the kind of statistics of a feature."""
    if feature.stored == "image":
        return IMAGE
    if feature.dtype == "string":
        return TEXT
    if feature.shape:
        return TENSOR
    return CLASS if feature.num_classes else NUMBER


class Accumulator:
    """Statistics of some examples, which can be merged."""

    def __init__(
        self,
        features: Mapping[str, FeatureSpec],
        inputs: Sequence[str],
        targets: Sequence[str],
        *,
        vocabulary: int,
        seed: int | tuple[int, ...] = 0,
    ) -> None:
        """Begin without examples.

        Args:
            features: features of the dataset.
            inputs: features that identify equal examples.
            targets: features whose association with others is measured.
            vocabulary: most values of a text to keep.
            seed: seed of the sample; a different one for each part.
        """
        self.examples = 0
        self._features = features
        self._kinds = {name: find_kind(each) for name, each in features.items()}
        self._inputs, self._targets = inputs, targets
        self._missing = dict.fromkeys(features, 0)
        self._moments = {name: Moments() for name in features}
        self._elements = {
            name: [Moments() for _ in range(features[name].shape[0] or 0)]
            for name in inputs
            if self._kinds[name] == TENSOR and _is_vector(features[name])
        }
        counted = [name for name, kind in self._kinds.items() if kind in (TEXT, CLASS)]
        self._counts = {name: BoundedCounter(vocabulary) for name in counted}
        texts = [name for name in inputs if self._kinds[name] == TEXT]
        self._words = {name: BoundedCounter(vocabulary) for name in texts}
        self._pairs = {name: BoundedCounter(vocabulary) for name in texts}
        numbers = [name for name, kind in self._kinds.items() if kind == NUMBER]
        most = max(_LEAST_VALUES, min(MOST_EXAMPLES, _MOST_VALUES // max(1, len(numbers))))
        self._values = {name: Hashes(most) for name in numbers}
        self._hashes = Hashes()
        self._sample = Sample(
            [each for name in features for each in self._list_columns(name)], seed
        )

    def add(self, columns: Mapping[str, Any]) -> None:
        """Add some examples: arrays whose first axis is the example, or lists of encoded images."""
        examples = len(next(iter(columns.values())))
        if not examples:
            return
        self.examples += examples
        inputs = {
            name: comparable_content(columns[name], self._features[name].labels)
            for name in self._inputs
        }
        self._hashes.add(hashes(inputs, _SALT))
        chosen = self._sample.choose(examples)
        sampled: dict[str, NDArray[np.float64]] = {}
        for name, kind in self._kinds.items():
            values = columns[name]
            if kind == TEXT:
                sampled[name] = self._add_texts(name, values, chosen)
            elif kind == IMAGE:
                sizes = np.array([len(each) for each in values], np.float64)
                self._moments[name].add(sizes)
                sampled[name] = sizes[chosen]
            elif kind == TENSOR:
                sampled |= self._add_tensors(name, values, chosen)
            else:
                sampled[name] = self._add_numbers(name, values)[chosen]
        self._sample.keep(sampled)

    def merge(self, other: Accumulator) -> None:
        """Add the statistics of further examples."""
        self.examples += other.examples
        for name in self._features:
            self._missing[name] += other._missing[name]
            self._moments[name].merge(other._moments[name])
        for name, elements in self._elements.items():
            for mine_, other_ in zip(elements, other._elements[name], strict=True):
                mine_.merge(other_)
        for mine, others in zip(self._counters(), other._counters(), strict=True):
            for name, counter in mine.items():
                counter.merge(others[name])
        for name, values in self._values.items():
            values.merge(other._values[name])
        self._hashes.merge(other._hashes)
        self._sample.merge(other._sample)

    def result(self) -> SplitStatistics:
        """Return the statistics of all examples."""
        sample = self._sample.columns()
        return SplitStatistics(
            examples=self.examples,
            features={name: self._feature(name, sample) for name in self._features},
        )

    def sketch(self) -> ExampleSketch:
        """Return the sketch by which splits are compared."""
        found, copies = self._hashes.smallest()
        return ExampleSketch(
            hashes=found,
            copies=copies,
            is_whole=self._hashes.is_whole,
            sample=self._sample.columns(),
        )

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the state as arrays, for a NumPy file."""
        rest = {
            "examples": self.examples,
            "missing": self._missing,
            "moments": {name: each.state() for name, each in self._moments.items()},
            "elements": {
                name: [each.state() for each in found] for name, found in self._elements.items()
            },
            "counters": [
                {name: each.state() for name, each in counters.items()}
                for counters in self._counters()
            ],
        }
        values = [each.arrays(f"value/{name}/") for name, each in self._values.items()]
        return {
            **{name: each for arrays in values for name, each in arrays.items()},
            "rest": np.array(json.dumps(rest)),
            **self._hashes.arrays(),
            **self._sample.arrays(),
        }

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Continue with the state from `arrays`."""
        rest = json.loads(str(arrays["rest"]))
        self.examples, self._missing = rest["examples"], rest["missing"]
        self._moments = {name: Moments(*state) for name, state in rest["moments"].items()}
        self._elements = {
            name: [Moments(*state) for state in states] for name, states in rest["elements"].items()
        }
        for counters, states in zip(self._counters(), rest["counters"], strict=True):
            for name, counter in counters.items():
                counter.restore(states[name])
        for name, values in self._values.items():
            values.restore(arrays, f"value/{name}/")
        self._hashes.restore(arrays)
        self._sample.restore(arrays)

    def _counters(self) -> tuple[dict[str, BoundedCounter], ...]:
        return self._counts, self._words, self._pairs

    def _list_columns(self, name: str) -> list[str]:
        if self._kinds[name] != TENSOR:
            return [name]
        return [name, f"{name}/std", *(f"{name}/{index}" for index in range(_PROJECTIONS))]

    def _add_numbers(self, name: str, values: Any) -> NDArray[np.float64]:
        given = np.asarray(values)
        wide = given.astype(np.float64)
        present = given[np.isfinite(wide)]
        self._missing[name] += len(wide) - len(present)
        self._moments[name].add(present)
        if name in self._values and len(present):
            # Computed before the conversion: a float cannot hold all digits of an integer.
            self._values[name].add(hashes({"": present}, 0))
        if name in self._counts:
            names = dict(enumerate(self._features[name].labels))
            found, counts = np.unique(present.astype(np.int64), return_counts=True)
            texts = [names.get(value, str(value)).encode() for value in found.tolist()]
            self._counts[name].add_counts(dict(zip(texts, counts.tolist(), strict=True)))
        return wide

    def _add_texts(self, name: str, values: Any, chosen: NDArray[np.intp]) -> NDArray[np.float64]:
        each = [_list_texts(value) for value in values]
        texts = [text for example in each for text in example]
        self._missing[name] += sum(not any(example) for example in each)
        present = [text for text in texts if text]
        self._counts[name].add(present)
        if name in self._words:
            self._add_words(name, present)
        joined = np.empty(len(chosen), object)
        joined[:] = [b"\0".join(each[index]) for index in chosen]
        found = hashes({"": joined}, 0) if len(chosen) else np.empty(0, np.uint64)
        coded = (found >> np.uint64(11)).astype(np.float64)
        coded[[not text.strip(b"\0") for text in joined]] = np.nan
        return coded

    def _add_words(self, name: str, texts: Sequence[bytes]) -> None:
        found = [split_words(text) for text in texts]
        self._words[name].add(word for words in found for word in set(words))
        # There are as many pairs as words, so they are never held for all texts at once.
        for words in found:
            self._pairs[name].add({b" ".join(pair) for pair in pairwise(words)})

    def _add_tensors(
        self, name: str, values: Any, chosen: NDArray[np.intp]
    ) -> dict[str, NDArray[np.float64]]:
        if isinstance(values, np.ndarray) and values.dtype != object:
            flat = values.reshape(len(values), -1)
            wide = flat.astype(np.float64)
            self._add_elements(name, wide)
            for place, moments in enumerate(self._elements.get(name, ())):
                moments.add(flat[np.isfinite(wide[:, place]), place])
            rows = wide[chosen]
            found = [rows.mean(1), rows.std(1), *_project(rows)]
        else:
            arrays = [np.asarray(value, np.float64).ravel() for value in values]
            self._add_elements(name, np.concatenate(arrays) if arrays else np.empty(0))
            some = [arrays[index] for index in chosen]
            means = np.array([each.mean() if each.size else np.nan for each in some])
            stds = np.array([each.std() if each.size else np.nan for each in some])
            found = [means, stds, *[np.zeros(len(some))] * _PROJECTIONS]
        return dict(zip(self._list_columns(name), found, strict=True))

    def _add_elements(self, name: str, values: NDArray[np.float64]) -> None:
        finite = np.isfinite(values)
        if not finite.all():
            whole = finite.reshape(len(values), -1).all(1)
            self._missing[name] += int((~whole).sum())
        self._moments[name].add(values[finite])

    def _feature(self, name: str, sample: Mapping[str, NDArray[np.float64]]) -> FeatureStatistics:
        kind, moments = self._kinds[name], self._moments[name]
        found = sample[name][np.isfinite(sample[name])]
        is_number = kind in (NUMBER, TENSOR, IMAGE) and moments.count > 0
        quantiles = np.quantile(found, np.linspace(0, 1, STEPS + 1)) if len(found) else found
        return FeatureStatistics(
            kind=kind,
            examples=self.examples,
            missing=self._missing[name],
            mean=moments.mean if is_number else None,
            std=moments.std if is_number else None,
            least=moments.least if is_number else None,
            most=moments.most if is_number else None,
            means=tuple(each.mean for each in self._elements.get(name, ())),
            stds=tuple(each.std for each in self._elements.get(name, ())),
            quantiles=tuple(quantiles.tolist()) if is_number else (),
            counts=self._counts[name].counts() if name in self._counts else {},
            distinct=self._distinct(name),
            words=self._words[name].counts() if name in self._words else {},
            pairs=self._pairs[name].counts() if name in self._pairs else {},
            association={
                target: self._association(name, target, sample)
                for target in self._targets
                if target != name and self._kinds[target] in (NUMBER, CLASS)
            },
        )

    def _distinct(self, name: str) -> int:
        if name in self._counts:
            return self._counts[name].distinct
        present = self.examples - self._missing[name]
        return self._values[name].distinct(present) if name in self._values else 0

    def _association(
        self, name: str, target: str, sample: Mapping[str, NDArray[np.float64]]
    ) -> float:
        return round(
            max(
                measure_association(
                    sample[column],
                    sample[target],
                    first_is_class=self._kinds[name] in (TEXT, CLASS),
                    second_is_class=self._kinds[target] == CLASS,
                )
                for column in self._list_columns(name)
            ),
            6,
        )


def _is_vector(feature: FeatureSpec) -> bool:
    return len(feature.shape) == 1 and 0 < (feature.shape[0] or 0) <= _LONGEST


def _list_texts(value: Any) -> list[bytes]:
    return [value] if isinstance(value, bytes) else [bytes(each) for each in np.ravel(value)]


def is_letter(text: str) -> bool:
    """Say whether a text begins with a letter of a script without spaces."""
    return bool(_LETTER.match(text))


def split_words(text: bytes) -> list[bytes]:
    """Return the words of a text; a letter of a script without spaces is a word."""
    plain = _PUNCTUATION.sub(b"", text.lower())
    if not plain.isascii():
        plain = _LETTER.sub(r" \1 ", plain.decode("utf-8", "surrogateescape")).encode(
            "utf-8", "surrogateescape"
        )
    return plain.split()


def _project(rows: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Return projections of each row on fixed random signs."""
    signs = np.random.RandomState(0).choice([-1.0, 1.0], (rows.shape[1], _PROJECTIONS))
    return list((rows @ signs).T)
