"""Recall at k: as plain counting finds it, over all pairs, in blocks of any size."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.tasks.retrieval.recall import Search, Vectors

RANDOM = np.random.default_rng(0)
SIZE = 4


def examples(count=300, users=40, items=60, *, rounded=False):
    """Examples of sparse ids, whose vectors follow from the id."""
    who, what = RANDOM.integers(0, users, count), RANDOM.integers(0, items, count)
    of_users, of_items = (RANDOM.normal(size=(n, SIZE)).astype("float32") for n in (users, items))
    if rounded:
        of_users, of_items = np.round(of_users), np.round(of_items)
    taken = RANDOM.random(count) < 0.3
    return who * 10**12, what * 10**13 + 7, taken, of_users[who], of_items[what]


def counted(given, k):
    """The recall of each user that took something, by the definition, one pair after the other."""
    who, what, taken, of_users, of_items = given
    vector = {item: of_items[np.flatnonzero(what == item)[0]] for item in np.unique(what)}
    found = []
    for user in np.unique(who[taken]):
        own = of_users[np.flatnonzero(who == user)[0]]
        scores = {item: own @ each for item, each in vector.items()}
        relevant = np.unique(what[taken & (who == user)])
        hits = 0
        for item in relevant:
            others = [score for other, score in scores.items() if other != item]
            hits += sum(score >= scores[item] for score in others) < k
        found.append(hits / len(relevant))
    return found


def search_of(given, size=50):
    search = Search()
    for begin in range(0, len(given[0]), size):
        search.add(*(each[begin : begin + size] for each in given))
    return search


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("at_once", [1, 200, 1 << 24], ids=["a user", "some", "all"])
def test_it_is_what_counting_finds(rounded, at_once):
    given = examples(rounded=rounded)
    search = search_of(given)
    found = search.recalls([1, 5, 20], at_once)
    assert search.candidates == len(np.unique(given[1]))
    for k, values in found.items():
        np.testing.assert_allclose(values, counted(given, k), err_msg=f"at {k}")
    assert 0 < found[5].mean() < found[20].mean() < 1


def test_a_model_that_scores_all_alike_finds_nothing():
    who, what, taken, of_users, of_items = examples()
    search = search_of((who, what, taken, np.zeros_like(of_users), of_items))
    assert search.recalls([10])[10].max() == 0


def test_all_are_found_among_as_many_as_there_are_and_none_is_defined_beyond():
    given = examples()
    search = search_of(given)
    found = search.recalls([search.candidates, search.candidates + 1])
    assert set(found) == {search.candidates}
    assert found[search.candidates].min() == 1


def test_users_that_took_nothing_do_not_count():
    who, what, taken, *vectors = examples()
    nothing = who == who[0]
    search = search_of((who, what, taken & ~nothing, *vectors))
    assert len(search.recalls([5])[5]) == len(np.unique(who[taken & ~nothing]))
    search = search_of((who, what, np.zeros_like(taken), *vectors))
    assert len(search.recalls([5])[5]) == 0


def test_an_item_counts_once_however_often_a_user_took_it():
    ids = np.array([1, 1, 1, 2])
    vectors = np.array([[1.0], [1.0], [1.0], [2.0]], "float32")
    user = np.zeros(4, np.int64)
    search = search_of((user, ids, np.ones(4, bool), np.ones((4, 1), "float32"), vectors))
    np.testing.assert_array_equal(search.recalls([1])[1], [0.5])


def test_texts_are_ids_too_and_the_first_vector_of_an_id_is_its_own():
    vectors = Vectors()
    names = np.array([b"b", b"a", b"b"], object)
    vectors.add(names, np.array([[1.0], [2.0], [3.0]]))
    vectors.add(names[::-1], np.array([[4.0], [5.0], [6.0]]))
    ids, found = vectors.all()
    assert ids.tolist() == [b"a", b"b"]
    np.testing.assert_array_equal(found, [[2.0], [1.0]])
