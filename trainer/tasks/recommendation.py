"""Recommendation: whether a user takes an offered item, and retrieval among all items.

    label     as in `ranking`: taken or not
    outputs   [n, 1 + 2 size]: the logit of "taken", the user's vector, the item's vector
    loss      binary cross entropy of the logit; a model may add a loss for its vectors, as
              `flotilla.trainer.models.two_tower` does
    metrics   as in `ranking`; an evaluation and its slices add `recall_at_<k>`
    answers   `logit`, `probability`, `user_vector`, `item_vector`. To retrieve items for a user,
              search for the largest dot products with the user's vector

`data.group` is the feature that identifies users, and `task.args.item` the feature that identifies
items.

Recall at k: the fraction of a user's taken items that are among the k retrieved items.

    candidates   all items of the evaluated examples, or of the slice; the same for every user
    relevant     the distinct items that the user took
    vectors      the vector of a user or an item is that of its first example
    score        the dot product of both vectors
    retrieved    items with fewer than k higher-scored candidates. Items whose scores are tied at
                 rank k count with the probability that a random order retrieves them, so constant
                 scores are as good as a random order
    recall       retrieved relevant items / relevant items of a user, averaged over the users with
                 a relevant item
    weight       the weight of a user is the mean weight of the user's examples

The search is exact: it scores all pairs, one block of users at a time. If there are fewer than k
candidates, or no relevant items, recall at k is undefined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.tasks.base import (
    Array,
    Constant,
    Examples,
    Floats,
    LazyExamples,
    Part,
    Shape,
    Tally,
    Target,
    example_weights,
)
from flotilla.trainer.tasks.objective import select_rows
from flotilla.trainer.tasks.ranking import Queries, Ranking

NUMBERS = (10, 100)
# Maximum number of scores in memory at a time (64 MiB, and about as much for sorting).
_AT_ONCE = 1 << 24
Places = npt.NDArray[np.int64]


class LogitLoss(keras.losses.BinaryCrossentropy):
    """The binary cross entropy of the first output column."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return the loss of each example [n]."""
        return super().call(y_true, y_pred[:, :1])


class Recommendation(Ranking):
    """A ranking task with user and item vectors. See the module docstring."""

    name = "recommendation"
    output_shape: ClassVar[Shape] = (-1,)

    def __init__(
        self, target: Target, *, group: str = "", item: str = "item", k: Sequence[int] = NUMBERS
    ) -> None:
        """Require a binary target and a group. `k` lists the cutoffs of `recall_at_<k>`."""
        super().__init__(target, group=group)
        if not group:
            raise ConfigError("no feature identifies users; set data.group to this feature")
        if not isinstance(k, Sequence) or isinstance(k, str) or not k:
            raise ConfigError(
                f"k: {k!r} is not allowed; write a list of numbers, such as [10, 100]"
            )
        for each in k:
            if type(each) is not int or each < 1:
                raise ConfigError(
                    f"k: {each!r} is not allowed; it must be a whole number of at least 1"
                )
        self._taken: Counter[Any] = Counter()
        self._user, self._item, self._numbers = group, item, tuple(dict.fromkeys(k))
        self.recall_names = tuple(map(_name_recall, self._numbers))
        self.directions = {  # type: ignore[misc]
            **Ranking.directions,
            **dict.fromkeys(self.recall_names, "higher"),
        }

    @property
    def columns(self) -> tuple[str, ...]:
        """The features that identify users and items."""
        return (self._user, self._item)

    def loss(self) -> keras.losses.Loss:
        """Return the cross entropy of the logit."""
        return LogitLoss(from_logits=True)

    def predictions(self, outputs: Any) -> Any:
        """Return the probabilities of "taken" [n, 1]."""
        return tf.sigmoid(outputs[:, :1])

    def answers(self, outputs: Any) -> dict[str, tf.Tensor]:
        """Return the logit, the probability, and both vectors of each example."""
        logit, user, item = tf.split(outputs, [1, *[_size(outputs)] * 2], axis=1)
        return {**super().answers(logit), "user_vector": user, "item_vector": item}

    def outputs_of(self, answers: Mapping[str, Any]) -> Any:
        """Return logits and vectors as one array."""
        logit = super().outputs_of(answers)
        return np.concatenate([logit, answers["user_vector"], answers["item_vector"]], axis=1)

    def check_output(self, output: Any, last: Any) -> None:
        """Require a logit and two vectors of the same size."""
        super().check_output(output, last)
        width = output.shape[-1]
        if width is None or width < 3 or width % 2 == 0:  # noqa: PLR2004
            raise ConfigError(
                f"{self.name} needs a logit and two vectors of the same size as output: the shape "
                f"must be (batch, 1 + 2 * size), not {tuple(output.shape)}"
            )

    @property
    def learns(self) -> tuple[str, ...]:
        """The label and the item feature."""
        return (self.target.name, self._item)

    def learn(self, training: Iterable[Mapping[str, Array]]) -> None:
        """Count how often each item was taken."""
        for batch in training:
            self._taken.update(batch[self._item][batch[self.target.name].astype(bool)].tolist())

    def constants(self, examples: Examples) -> list[Constant]:
        """Return the constants of a ranking, and the popularity of items in training, if known."""
        logits = super().constants(examples)
        width = next(iter(examples.parts())).outputs.shape[1] - 1
        found = [each._replace(outputs=np.pad(each.outputs, (0, width))) for each in logits]
        if self._taken:
            found.append(Constant("the most popular items", None, self._popular))
        return found

    def _popular(self, part: Part) -> Floats:
        items, place = np.unique(part.columns[self._item], return_inverse=True)
        counts = np.array([self._taken[each] for each in items.tolist()], np.float32)[place]
        found: Floats = np.zeros_like(part.outputs)
        found[:, 0], found[:, 1], found[:, 1 + _size(found)] = np.log1p(counts), 1, counts
        return found

    def group_values(self, metric: str, examples: Examples) -> Floats | None:
        """Return the metric of each user."""
        numbers = {_name_recall(each): each for each in self._numbers}
        if metric not in numbers:
            return super().group_values(metric, examples)
        search = Search()
        for part in examples.parts():
            self.fill(search, part)
        return search.recalls([numbers[metric]]).get(numbers[metric])

    def details(self, examples: Examples) -> dict[str, Any]:
        """Return the details of a ranking.

        Raises:
            UserError: a cutoff in `k` exceeds the number of evaluated items.
        """
        items = [np.unique(part.columns[self._item]) for part in examples.parts()]
        most = len(np.unique(np.concatenate(items)))
        if above := [each for each in self._numbers if each > most]:
            raise UserError(
                f"task.args.k: recall at {above[0]} needs more than the {most} evaluated items; "
                f"set a cutoff of at most {most}, or evaluate more examples"
            )
        return super().details(LazyExamples(examples, _select_logit))

    def tally(self) -> Tally:
        """Return an accumulator for the ranking metrics and recalls."""
        return _SearchTally(self, super().tally())

    def fill(self, search: Search, part: Part) -> None:
        """Add the examples of a part to a search. Examples of weight 0 are ignored."""
        size, weights = _size(part.outputs), example_weights(part)
        if not weights.all():
            part, weights = select_rows(part, weights > 0), weights[weights > 0]
        users, items = (part.columns[each] for each in (self._user, self._item))
        vectors = part.outputs[:, 1 : 1 + size], part.outputs[:, 1 + size :]
        search.add(users, items, part.labels.astype(bool), *vectors, weights)

    def recalls(self, search: Search) -> dict[str, Queries]:
        """Return the recalls of a search, for each cutoff in `k` up to the number of candidates."""
        weights, found = search.weights, search.recalls(self._numbers)
        return {_name_recall(each): Queries(values, weights) for each, values in found.items()}


class _SearchTally(Tally):
    def __init__(self, task: Recommendation, ranking: Tally) -> None:
        self._task, self._ranking, self._search = task, ranking, Search()
        self.inner = (ranking,)

    def add(self, part: Part) -> None:
        self._ranking.add(_select_logit(part))
        self._task.fill(self._search, part)

    def result(self) -> dict[str, Any]:
        found = self._ranking.result()
        recalls = self._task.recalls(self._search)
        found["metrics"] |= dict.fromkeys(self._task.recall_names)
        for name, each in recalls.items():
            if len(each.values):
                found["metrics"][name], found["intervals"][name] = each.mean, each.interval
        rows = [["all", self._search.candidates]]
        found["tables"] += [{"title": "Candidates", "columns": ["Items", "Number"], "rows": rows}]
        return found


def _select_logit(part: Part) -> Part:
    return part._replace(outputs=part.outputs[:, :1])


def _name_recall(number: int) -> str:
    return f"recall_at_{number}"


def _size(outputs: Any) -> int:
    return (int(outputs.shape[-1]) - 1) // 2


@dataclass
class Vectors:
    """The vector of each id, from the first example with this id."""

    _ids: list[Array] = field(default_factory=list)
    _vectors: list[Floats] = field(default_factory=list)

    def add(self, ids: Array, vectors: Floats) -> None:
        """Add examples: ids [n] and their vectors [n, size]."""
        known, first = np.unique(ids, return_index=True)
        self._ids.append(known)
        self._vectors.append(vectors[first].copy())
        if len(self._ids) > 1 and sum(map(len, self._ids[1:])) > len(self._ids[0]):
            self._merge()

    def all(self) -> tuple[Array, Floats]:
        """Return the sorted ids and their vectors."""
        self._merge()
        return self._ids[0], self._vectors[0]

    def _merge(self) -> None:
        known, first = np.unique(np.concatenate(self._ids), return_index=True)
        self._ids, self._vectors = [known], [np.concatenate(self._vectors)[first]]


class Search:
    """Collects users, items and taken pairs, without duplicates, and computes recalls."""

    def __init__(self) -> None:
        """Create an empty search."""
        self._users, self._items = Vectors(), Vectors()
        self._taken: list[tuple[Array, Array]] = []
        self._weights: list[tuple[Array, Array, Array]] = []

    def add(  # noqa: PLR0913, PLR0917
        self,
        users: Array,
        items: Array,
        taken: Array,
        of_users: Floats,
        of_items: Floats,
        weights: Floats | None = None,
    ) -> None:
        """Add examples: ids [n], whether the item was taken [n], vectors [n, size], weights [n]."""
        known, place, counts = np.unique(users, return_inverse=True, return_counts=True)
        heavy = counts if weights is None else np.bincount(place, weights)
        self._weights.append((known, heavy, counts))
        self._users.add(users, of_users)
        self._items.add(items, of_items)
        self._taken.append((users[taken], items[taken]))

    @property
    def candidates(self) -> int:
        """The number of items that can be retrieved."""
        return len(self._items.all()[0])

    @property
    def weights(self) -> Floats:
        """The weight of each user who took an item, in the order of `recalls`."""
        users, heavy, counts = (np.concatenate(each) for each in zip(*self._weights, strict=True))
        known, place = np.unique(users, return_inverse=True)
        takers = np.isin(known, np.concatenate([users for users, _ in self._taken]))
        found: Floats = (np.bincount(place, heavy) / np.bincount(place, counts))[takers]
        return found

    def recalls(self, numbers: Sequence[int], at_once: int = _AT_ONCE) -> dict[int, Floats]:
        """Return the recalls [users] at each cutoff in `numbers`, for the users who took an item.

        Cutoffs greater than the number of candidates are left out. About `at_once` scores are in
        memory at the same time.
        """
        users, of_users = self._users.all()
        items, of_items = self._items.all()
        rows, columns = self._pairs(users, items)
        there = [each for each in numbers if each <= len(items)]
        found = {number: np.zeros(len(rows)) for number in there}
        # Score equal vectors once, because rounding could otherwise give them different scores.
        as_bytes = np.ascontiguousarray(of_items).view(np.dtype((np.void, of_items[0].nbytes)))
        _, first, same = np.unique(as_bytes.ravel(), return_index=True, return_inverse=True)
        takers, user, counts = np.unique(rows, return_inverse=True, return_counts=True)
        ends, size = np.cumsum(counts), max(1, at_once // max(1, len(items)))
        for begin in range(0, len(takers) if there else 0, size):
            some = takers[begin : begin + size]
            pairs = slice(ends[begin] - counts[begin], ends[begin + len(some) - 1])
            scores = (of_users[some] @ of_items[first].T)[:, same]
            at = user[pairs] - begin
            own = scores[at, columns[pairs]]
            for number in there:
                found[number][pairs] = _share_found(scores, number, at, own)
        return {number: np.bincount(user, hits) / counts for number, hits in found.items()}

    def _pairs(self, users: Array, items: Array) -> tuple[Places, Places]:
        who, what = (np.concatenate(each) for each in zip(*self._taken, strict=True))
        both = np.searchsorted(users, who) * len(items) + np.searchsorted(items, what)
        return np.divmod(np.unique(both), len(items))


def _share_found(scores: Floats, number: int, rows: Places, own: Floats) -> Floats:
    """Return the probability that each score `own` [n] is among the best `number` of its row.

    The scores of each row are permuted in place.
    """
    place = scores.shape[1] - number
    scores.partition(place, axis=1)
    least = scores[:, place, np.newaxis]
    better, equal = (scores > least).sum(axis=1), (scores == least).sum(axis=1)
    share, least = (number - better) / equal, least[:, 0]
    result: Floats = np.where(own > least[rows], 1.0, np.where(own == least[rows], share[rows], 0))
    return result
