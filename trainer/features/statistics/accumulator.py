"""Accumulates the statistics of a split in one pass, and measures the association of columns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.statistics.hashing import (
    combine,
    comparable_content,
    digest,
)
from flotilla.trainer.features.statistics.one_pass import (
    MOST_EXAMPLES,
    BoundedCounter,
    Hashes,
    Moments,
    Sample,
)
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
from flotilla.trainer.features.statistics.words import count_words

# Number of intervals between the quantiles of a number.
STEPS = 1000
# Seed of example hashes. With the seed that assigns splits, each split would have its own range.
_SALT = 0x5EED
_PROJECTIONS = 4
# The statistics of numbers, which other features lack.
_RANGE = ("mean", "std", "least", "most")
# Statistics of each element are kept only for vectors up to this length.
_LONGEST = 4096
# Maximum number of value hashes of all features together, and the minimum number per feature.
_MOST_VALUES, _LEAST_VALUES = 1 << 20, 1 << 10


def find_kind(feature: FeatureSpec) -> str:
    """Return the kind of a feature, which determines the statistics that are kept."""
    if feature.stored == "image":
        return IMAGE
    if feature.dtype == "string":
        return TEXT
    if feature.shape:
        return TENSOR
    return CLASS if feature.num_classes else NUMBER


class Accumulator:
    """Mergeable statistics of a set of examples."""

    def __init__(
        self,
        features: Mapping[str, FeatureSpec],
        inputs: Sequence[str],
        targets: Sequence[str],
        *,
        vocabulary: int,
        seed: int | tuple[int, ...] = 0,
    ) -> None:
        """Create statistics without examples.

        Args:
            features: the features of the dataset.
            inputs: the features by which examples are compared.
            targets: the features whose association with the others is measured.
            vocabulary: the maximum number of values to keep of a string or class.
            seed: the seed of the sample. It must differ between parts that are merged.
        """
        self.examples = 0
        self._features = features
        self._kinds = {name: find_kind(each) for name, each in features.items()}
        self._inputs, self._targets = inputs, targets
        self._missing = dict.fromkeys(features, 0)
        self._moments = {name: Moments() for name in features}
        self._elements = {
            name: Moments()
            for name in inputs
            if self._kinds[name] == TENSOR and _is_vector(features[name])
        }
        counted = [name for name, kind in self._kinds.items() if kind in (TEXT, CLASS)]
        texts = [name for name in inputs if self._kinds[name] == TEXT]
        self._words = {name: BoundedCounter(vocabulary) for name in texts}
        self._pairs = {name: BoundedCounter(vocabulary) for name in texts}
        self._counts = {
            name: BoundedCounter(vocabulary, partial(self._add_words, name)) for name in counted
        }
        valued = [name for name, kind in self._kinds.items() if kind in (NUMBER, TEXT)]
        most = max(_LEAST_VALUES, min(MOST_EXAMPLES, _MOST_VALUES // max(1, len(valued))))
        self._values = {name: Hashes(most) for name in valued}
        self._hashes = Hashes()
        self._sample = Sample(
            [each for name in features for each in self._list_columns(name)], seed
        )

    def add(self, columns: Mapping[str, Any]) -> None:
        """Add examples, as columns in the forms of `trainer/data/columns.py`."""
        examples = len(next(iter(columns.values())))
        if not examples:
            return
        self.examples += examples
        columns = {
            name: _encode_texts(columns[name]) if kind == TEXT else columns[name]
            for name, kind in self._kinds.items()
        }
        digests = {
            name: digest(comparable_content(columns[name], feature.labels))
            for name, feature in self._features.items()
            if name in self._inputs or self._kinds[name] == TEXT
        }
        self._hashes.add(combine({name: digests[name] for name in self._inputs}, _SALT))
        chosen = self._sample.choose(examples)
        sampled: dict[str, NDArray[np.float64]] = {}
        for name, values in columns.items():
            kind = self._kinds[name]
            if kind == TEXT:
                sampled[name] = self._add_texts(name, values, digests[name], chosen)
            elif kind == IMAGE:
                sizes = pc.binary_length(values).to_numpy().astype(np.float64)
                self._moments[name].add(sizes)
                sampled[name] = sizes[chosen]
            elif kind == TENSOR:
                sampled |= self._add_tensors(name, values, chosen)
            else:
                sampled[name] = self._add_numbers(name, values, digests.get(name))[chosen]
        self._sample.keep(sampled)

    def merge(self, other: Accumulator) -> None:
        """Add the statistics of other examples."""
        self.examples += other.examples
        for name in self._features:
            self._missing[name] += other._missing[name]
            self._moments[name].merge(other._moments[name])
        for name, elements in self._elements.items():
            elements.merge(other._elements[name])
        for (_, mine), (_, others) in zip(self._counters(), other._counters(), strict=True):
            mine.merge(others)  # type: ignore[arg-type]
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
        whole, sample = self._hashes.is_whole, self._sample.columns()
        return ExampleSketch(hashes=found, copies=copies, is_whole=whole, sample=sample)

    def moments(self, name: str) -> Moments:
        """Return the moments of a feature's numbers. The numbers of a class are its indices."""
        return self._moments[name]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the state as arrays, for a NumPy file."""
        rest = {
            "examples": self.examples,
            "missing": self._missing,
            "moments": {name: each.state() for name, each in self._moments.items()},
            "elements": {name: each.state() for name, each in self._elements.items()},
        }
        found = {"rest": np.array(json.dumps(rest)), **self._hashes.arrays()}
        for prefix, each in self._counters():
            found |= each.arrays(prefix)
        return {**found, **self._sample.arrays()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the state from `arrays`."""
        rest = json.loads(str(arrays["rest"]))
        self.examples, self._missing = rest["examples"], rest["missing"]
        self._moments = {name: Moments(*state) for name, state in rest["moments"].items()}
        self._elements = {
            name: Moments(*map(np.array, state)) for name, state in rest["elements"].items()
        }
        for prefix, each in self._counters():
            each.restore(arrays, prefix)
        self._hashes.restore(arrays)
        self._sample.restore(arrays)

    def _counters(self) -> Iterator[tuple[str, BoundedCounter | Hashes]]:
        for each in self._counts.values():
            # Settle the counts first, because this also adds the words of pending strings.
            each.settle()
        kinds = {"count": self._counts, "word": self._words, "pair": self._pairs}
        for kind, parts in ({"value": self._values} | kinds).items():
            yield from ((f"{kind}/{name}/", each) for name, each in parts.items())

    def _list_columns(self, name: str) -> list[str]:
        if self._kinds[name] != TENSOR:
            return [name]
        return [name, f"{name}/std", *(f"{name}/{index}" for index in range(_PROJECTIONS))]

    def _add_numbers(self, name: str, values: Any, digests: Any) -> NDArray[np.float64]:
        wide: NDArray[np.float64] = np.asarray(values).astype(np.float64)
        present = np.isfinite(wide)
        self._missing[name] += len(wide) - int(present.sum())
        self._moments[name].add(values)
        if name in self._values:
            # Digest float64 values again, because `digests` are of values rounded to float32.
            found = digest(values) if digests is None or values.dtype == np.float64 else digests
            self._values[name].add(combine({"": found[present]}, 0))
        if name in self._counts:
            names = dict(enumerate(self._features[name].labels))
            found, counts = np.unique(values[present].astype(np.int64), return_counts=True)
            texts = [names.get(value, str(value)).encode() for value in found.tolist()]
            self._counts[name].add(pa.array(texts, pa.large_binary()), counts)
        return wide

    def _add_texts(
        self, name: str, values: pa.Array, digests: NDArray[np.uint64], chosen: NDArray[np.intp]
    ) -> NDArray[np.float64]:
        is_list = pa.types.is_large_list(values.type)
        coded = _encode_texts(values.flatten()) if is_list else values
        places, texts = coded.indices.to_numpy(), coded.dictionary
        filled = pc.not_equal(texts, b"").to_numpy(zero_copy_only=False)
        present = filled[places]
        of_texts = np.empty(len(texts), np.uint64)
        of_texts[places] = digest(coded) if is_list else digests
        self._values[name].add(combine({"": of_texts[filled]}, 0))
        counts = np.bincount(places, minlength=len(texts))
        self._counts[name].add(texts.filter(pa.array(filled)), counts[filled])
        if is_list:
            starts = values.offsets.to_numpy() - values.offsets[0].as_py()
            present = np.diff(np.cumsum([0, *present])[starts]) > 0
        self._missing[name] += int((~present).sum())
        # Keep 53 bits, which a float64 represents exactly.
        found = (combine({"": digests[chosen]}, 0) >> np.uint64(11)).astype(np.float64)
        return np.where(present[chosen], found, np.nan)

    def _add_words(self, name: str, texts: pa.Array, counts: NDArray[np.int64]) -> None:
        for words, pairs in count_words(texts, counts) if name in self._words else ():
            self._words[name].add(*words)
            self._pairs[name].add(*pairs)

    def _add_tensors(
        self, name: str, values: Any, chosen: NDArray[np.intp]
    ) -> dict[str, NDArray[np.float64]]:
        if isinstance(values, pa.Array):
            self._add_elements(name, values.flatten().to_numpy(zero_copy_only=False))
            found = [*_describe_lists(values.take(pa.array(chosen)))]
            found += [np.zeros(len(chosen))] * _PROJECTIONS
        else:
            flat = values.reshape(len(values), -1)
            self._add_elements(name, flat)
            rows = flat[chosen].astype(np.float64)
            found = [rows.mean(1), rows.std(1), *(rows @ _signs(rows.shape[1])).T]
        return dict(zip(self._list_columns(name), found, strict=True))

    def _add_elements(self, name: str, values: NDArray[Any]) -> None:
        self._moments[name].add(values.ravel())
        if name in self._elements:
            self._elements[name].add(values)
        if values.dtype.kind not in "iub":
            finite = np.isfinite(values.astype(np.float64))
            self._missing[name] += int((~finite.reshape(len(values), -1).all(1)).sum())

    def _feature(self, name: str, sample: Mapping[str, NDArray[np.float64]]) -> FeatureStatistics:
        kind, moments = self._kinds[name], self._moments[name]
        elements = self._elements.get(name)
        found = sample[name][np.isfinite(sample[name])]
        is_number = kind in (NUMBER, TENSOR, IMAGE) and moments.count > 0
        quantiles = np.quantile(found, np.linspace(0, 1, STEPS + 1)) if len(found) else found
        return FeatureStatistics(
            kind=kind,
            examples=self.examples,
            missing=self._missing[name],
            **{each: float(getattr(moments, each)) for each in (_RANGE if is_number else ())},
            means=tuple(np.ravel(elements.mean).tolist()) if elements else (),
            stds=tuple(np.ravel(elements.std).tolist()) if elements else (),
            quantiles=tuple(quantiles.tolist()) if is_number else (),
            # Count the strings first, because counting them also adds their words.
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
        counter = self._counts.get(name)
        if counter and (counter.is_whole or name not in self._values):
            return counter.distinct
        if name not in self._values:
            return 0
        # Each distinct text of a batch is hashed only once, so the number of added hashes is
        # unknown.
        present = None if counter else self.examples - self._missing[name]
        return self._values[name].distinct(present)

    def _association(
        self, name: str, target: str, sample: Mapping[str, NDArray[np.float64]]
    ) -> float:
        measure = partial(
            measure_association,
            first_is_class=self._kinds[name] in (TEXT, CLASS),
            second_is_class=self._kinds[target] == CLASS,
        )
        columns = self._list_columns(name)
        return round(max(measure(sample[each], sample[target]) for each in columns), 6)


def _is_vector(feature: FeatureSpec) -> bool:
    return len(feature.shape) == 1 and 0 < (feature.shape[0] or 0) <= _LONGEST


def _encode_texts(array: pa.Array) -> pa.Array:
    """Dictionary-encode strings. Lists of strings are unchanged."""
    is_coded = pa.types.is_dictionary(array.type) or pa.types.is_large_list(array.type)
    return array if is_coded else array.dictionary_encode()


def _describe_lists(lists: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean and the standard deviation of each list, or NaN for an empty list."""
    numbers = lists.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
    lengths = np.diff(lists.offsets.to_numpy())
    means, stds = np.full((2, len(lists)), np.nan)
    filled = lengths > 0
    if filled.any():
        counts, starts = lengths[filled], (np.cumsum(lengths) - lengths)[filled]
        means[filled] = np.add.reduceat(numbers, starts) / counts
        squares = (numbers - np.repeat(means[filled], counts)) ** 2
        stds[filled] = np.sqrt(np.add.reduceat(squares, starts) / counts)
    return means, stds


@lru_cache(maxsize=16)
def _signs(size: int) -> NDArray[np.float64]:
    """Return fixed vectors of random signs [size, projections]. Rows are projected onto them."""
    return np.random.RandomState(0).choice([-1.0, 1.0], (size, _PROJECTIONS))


# Maximum number of separate classes. All rarer values together form one more class.
MOST_VALUES = 100
_FEWEST = 10
Values = NDArray[np.float64]


def measure_association(
    first: Values, second: Values, *, first_is_class: bool, second_is_class: bool
) -> float:
    """Return the association of two columns of the same examples. NaN is a missing value.

    It is from 0 (independent) to 1 (one determines the other). For two numbers, it is the absolute
    rank correlation (Spearman). For a number and a class, it is the correlation ratio (Fisher) of
    the ranks, because outliers would dominate the ratio of the values. For two classes, it is
    Cramér's V. The last two are corrected for chance, because many classes increase them ("A
    bias-correction for Cramér's V", Bergsma 2013; "epsilon squared", Kelley 1935).
    """
    present = np.isfinite(first) & np.isfinite(second)
    first, second = first[present], second[present]
    if len(first) < _FEWEST:
        return 0.0
    if first_is_class and second_is_class:
        return _cramer(_encode(first), _encode(second))
    if first_is_class:
        return _ratio(_ranks(second), _encode(first))
    if second_is_class:
        return _ratio(_ranks(first), _encode(second))
    return _correlation(_ranks(first), _ranks(second))


def _ranks(values: Values) -> Values:
    """Return ranks, with the mean rank for ties. Importing SciPy for this would take too long."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    found: Values = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return found


def _encode(values: Values) -> NDArray[np.int64]:
    """Encode values as small integers, the most frequent first. Rare values share one integer."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = np.empty(len(counts), np.int64)
    ranks[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    coded: NDArray[np.int64] = np.minimum(ranks, MOST_VALUES)[places]
    return coded


def _correlation(first: Values, second: Values) -> float:
    one, two = first - first.mean(), second - second.mean()
    scale = float(np.sqrt((one**2).sum() * (two**2).sum()))
    return min(1.0, abs(float((one * two).sum())) / scale) if scale > 0 else 0.0


def _ratio(number: Values, classes: NDArray[np.int64]) -> float:
    counts = np.bincount(classes)
    used = counts > 0
    groups, examples = int(used.sum()), len(number)
    centred = number - number.mean()
    total = float((centred**2).sum())
    if groups < 2 or groups >= examples or total <= 0:  # noqa: PLR2004
        return 0.0
    sums = np.bincount(classes, centred)[used]
    within = total - float((sums**2 / counts[used]).sum())
    corrected = 1 - (within / (examples - groups)) / (total / (examples - 1))
    return float(np.sqrt(min(1.0, max(0.0, corrected))))


def _cramer(first: NDArray[np.int64], second: NDArray[np.int64]) -> float:
    rows, columns, examples = int(first.max()) + 1, int(second.max()) + 1, len(first)
    if min(rows, columns) < 2:  # noqa: PLR2004
        return 0.0
    table = np.bincount(first * columns + second, minlength=rows * columns)
    table = table.reshape(rows, columns).astype(np.float64)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / examples
    chi = float(((table - expected) ** 2 / np.where(expected > 0, expected, 1.0)).sum())
    chance = (rows - 1) * (columns - 1) / (examples - 1)
    phi = max(0.0, chi / examples - chance)
    sizes = [size - (size - 1) ** 2 / (examples - 1) for size in (rows, columns)]
    return float(np.sqrt(min(1.0, phi / max(min(sizes) - 1, 1e-9))))
