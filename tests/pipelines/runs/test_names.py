"""Names as people give them, in every command that finds something by its name."""

from __future__ import annotations

import json
import re
import shlex
from urllib.parse import quote, unquote_plus

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipelines.runs.kfp_access import Access
from pipelines.runs.kfp_client import connect
from pipelines.runs.submission import experiment_id
from pipelines.runs.upload import containing, equals, pipeline_id_of, uploaded
from tests.kfp_instance.server import Instance

NAMES = (
    "a+b",
    "100%",
    "50%25 of it",
    'say "hello"',
    "it's mine",
    "two words",
    "größer als 早い",
    "a&b=c#d?e/f",
    "back\\slash",
    "\\\\",
    "under_score",
    '"stringValue":1',
)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_one_name_is_one_thing_in_every_command(instance, remote, compiled, tmp_path, name):
    file = tmp_path / "ours.yaml"
    file.write_text(compiled.text)
    # What a wrong filter would find in its place.
    store = instance.store
    store.create_pipeline({"display_name": "aXb a b 100 under-score size"})
    store.create_experiment({"display_name": name.upper() + " "})
    there = ("--pipeline", name, "--experiment", name, "--name", name)
    for _again in range(2):
        assert remote("upload", file, "--name", name).code == 0
        submitted = remote("submit", *there, "--json")
        scheduled = remote("schedule", "--every", "6h", *there)
        assert (submitted.code, scheduled.code) == (0, 0), submitted.err + scheduled.err
    assert [p["display_name"] for p in store.pipelines.values()].count(name) == 1
    assert [e["display_name"] for e in store.experiments.values()].count(name) == 1
    assert [r["display_name"] for r in store.runs.values()] == [name, name]
    assert [r["display_name"] for r in store.recurring.values()] == [name]
    listed = remote("runs", "--experiment", name, "--json")
    assert len(listed.json["runs"]) == 2
    store.runs.pop(submitted.json["run_id"])
    assert remote("status", name, "--json").json["run_id"] in store.runs
    assert remote("unschedule", name).code == 0
    assert not store.recurring


def test_a_name_that_differs_by_capitals_is_another(instance, remote, uploaded):
    del uploaded
    remote("submit", "--name", "Mine", "--experiment", "Mine")
    remote("submit", "--name", "mine", "--experiment", "mine")
    assert len(remote("runs", "--experiment", "mine", "--json").json["runs"]) == 1
    found = remote("status", "mine", "--json").json["run_id"]
    assert instance.store.runs[found]["display_name"] == "mine"
    absent = remote("status", "MINE")
    assert (absent.code, absent.err.count("\n")) == (1, 1)
    assert "has no run 'MINE'" in absent.err


@pytest.mark.usefixtures("uploaded")
def test_a_command_in_a_message_can_be_pasted(remote, compiled, tmp_path):
    file = tmp_path / "ours.yaml"
    file.write_text(compiled.text)
    assert remote("upload", file, "--name", "other").code == 0
    there = ("schedule", "--every", "6h", "--name", "it's 5% more")
    assert remote(*there).code == 0
    answer = remote(*there, "--pipeline", "other")
    [command] = re.findall(r"`flotilla (unschedule .*)`", answer.err)
    assert remote(*shlex.split(command)).code == 0


@pytest.fixture(scope="module")
def served():
    with Instance() as instance:
        yield instance


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1))
@example(name="%2B")
@example(name="\\%_")
def test_any_text_is_a_name(served, compiled, name):
    if not name.strip():
        return
    client = connect(Access(endpoint=served.url))
    first, made = uploaded(client, compiled, name)
    assert made is (name not in _seen)
    _seen.add(name)
    assert uploaded(client, compiled, name) == (first, False)
    assert pipeline_id_of(client, name) == first.pipeline_id
    assert experiment_id(client, name) == experiment_id(client, name)


_seen: set[str] = set()


@pytest.mark.parametrize("made", [equals, containing])
def test_a_filter_is_encoded_once_more_than_the_rest_of_a_query(made):
    sent = made("display_name", "a+b %")
    assert not set(sent) & set('+ "{}')
    [predicate] = json.loads(unquote_plus(sent))["predicates"]
    assert predicate["stringValue"] == "a+b %"
    assert quote(unquote_plus(sent), safe="") == sent
