"""Equal examples: where few values make them, they are no copies."""

import numpy as np

from tests.trainer.data_gate.tables import profile, question, split_of
from trainer.data_gate import examples
from trainer.data_gate.profile import SplitProfile


def answers(seed, size=2000):
    rng = np.random.default_rng(seed)
    columns = {f"q{n}": rng.choice(["yes", "no", "?"], size) for n in range(4)}
    return profile(split_of({**columns, "label": (rng.random(size) < 0.5).astype(int)}))


def test_equal_answers_of_a_questionnaire_are_neither_duplicates_nor_leakage():
    for seed in range(10):
        asked = question(answers(seed), answers(seed + 20))
        assert not [*examples.duplicates(asked), *examples.leakage(asked)]


def test_leakage_is_estimated_from_the_smallest_hashes():
    rng = np.random.default_rng(0)
    hashes = np.sort(rng.integers(0, 2**63, 30_000).astype(np.uint64))
    one = np.ones(10_000, np.int64)
    known = SplitProfile(examples=30_000, hashes=hashes[:10_000], copies=one, has_all_hashes=False)
    tenth = hashes[::10]
    asked = SplitProfile(examples=3_000, hashes=tenth, copies=np.ones(3_000, np.int64))
    assert examples._shared(asked, known) == (1000, 1000)
    other = SplitProfile(examples=3_000, hashes=tenth + np.uint64(1), copies=asked.copies)
    assert examples._shared(other, known) == (1000, 0)
