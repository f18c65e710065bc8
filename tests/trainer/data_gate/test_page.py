"""The page: every feature next to the champion's, and nothing of the data is markup."""

import numpy as np

from tests.trainer.data_gate.skews import table
from tests.trainer.data_gate.tables import profile, split_of
from trainer.data_gate import page

FACTS = {
    "decision": "accepted", "dataset": "file:///d", "examples": {"train": 7},
    "champion": {"version": 3, "dataset": "file:///c", "note": ""}, "findings": [],
}  # fmt: skip


def drawn(columns, before=None, **more):
    new = profile(split_of(columns))
    old = profile(split_of(before)) if before else None
    return page.render({**FACTS, **more}, new, old).decode()


def test_histograms_stand_next_to_those_of_the_champion():
    rng = np.random.default_rng(0)
    text = drawn(table(rng, 300), table(rng, 300))
    assert text.count("<figure>") == 6
    assert 'class="old"' in text
    assert "data of version 3" in text
    assert 'class="old"' not in drawn(table(rng, 300))


def test_what_the_data_says_is_escaped():
    columns = table(np.random.default_rng(0), 300)
    evil = "<script>alert(1)</script>"
    columns[evil] = np.full(300, evil)
    finding = {"rule": "drift", "feature": evil, "split": "", "says": evil, "action": "warn"}
    text = drawn(columns, findings=[finding])
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_a_page_of_many_features_is_bounded_and_draws_those_with_findings():
    columns = table(np.random.default_rng(0), 60, width=400)
    finding = {"rule": "drift", "feature": "x394", "split": "", "says": "moved", "action": "warn"}
    text = drawn(columns, findings=[finding] * 500)
    assert text.count("<figure>") == page.MOST_FEATURES
    assert "<figcaption>x394</figcaption>" in text
    assert "341 further features are not drawn" in text
    assert len(text) < 1_000_000
