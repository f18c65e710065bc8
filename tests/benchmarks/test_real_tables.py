"""The page reports the measured results on real tables and texts."""

import pytest

from benchmarks import real_tables

FOUND = {"rows": 100, "test": 10, "metric": "auc", "direction": "higher", "half": 0.01}


@pytest.mark.parametrize(
    ("own", "said", "count"), [(0.8, "", "1 of 1"), (0.79, "below TF-IDF", "0 of 1")]
)
def test_a_row_of_texts_has_the_mean_of_all_seeds_and_says_what_is_missed(own, said, count):
    values = {"constant": 0.5, "TF-IDF, linear": 0.75}
    seeds = [{**FOUND, **values, "tf-idf": each, "flotilla": own} for each in (0.7, 0.9)]
    page = real_tables.table_of_texts({f"tweets {seed}": each for seed, each in enumerate(seeds)})
    row = next(line for line in page.splitlines() if "`tweets`" in line)
    assert row == (
        f"| `tweets` | two classes | 100, 10 | `auc` | 0.5 | 0.8 | 0.75 | {own:.3g} | {said} |"
    )
    assert f"At least TF-IDF with defaults on {count}." in page


def test_a_table_whose_package_is_not_there_is_skipped_with_its_name(tmp_path, monkeypatch, caplog):
    absent = ("texts", "label", lambda: real_tables._path("no_such_package", "texts.csv"))
    monkeypatch.setattr(real_tables, "TABLES", {})
    monkeypatch.setattr(real_tables, "TEXTS", {"absent": absent})
    monkeypatch.setattr(real_tables, "SEEDS", 1)
    assert real_tables.run(tmp_path / "kept.json", []) == {}
    assert "absent is skipped: No module named 'no_such_package'" in caplog.text
