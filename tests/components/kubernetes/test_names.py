"""Tests that generated names do not collide and that Kubernetes accepts them."""

import re

from hypothesis import given
from hypothesis import strategies as st

from flotilla.components.kubernetes.names import job_name, label_value

LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


@given(model=st.from_regex(r"\A[a-z0-9]([a-z0-9._-]{0,48}[a-z0-9])?\Z"), uri=st.text(max_size=80))
def test_a_name_with_its_longest_suffix_is_one_of_a_service(model, uri):
    name = f"{job_name(model, uri)}-evaluator-9999"
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", name)
    assert "--" not in job_name("a.-_b", uri)


@given(st.text(min_size=1, max_size=90))
def test_a_run_id_is_a_label(run_id):
    assert LABEL.fullmatch(label_value(run_id))


def test_different_runs_have_different_names():
    assert job_name("digits", "gs://b/run-1/checkpoints") != job_name(
        "digits", "gs://b/run-2/checkpoints"
    )
    long = "a" * 70
    assert len({label_value(each) for each in (f"{long}b", f"{long}c", "a b", "a:b", "a-b")}) == 5


def test_the_same_run_has_the_same_name():
    assert job_name("7", "gs://b/r/checkpoints") == job_name("7", "gs://b/r/checkpoints")
    assert label_value("digits-20260101-000000-abcd") == "digits-20260101-000000-abcd"
