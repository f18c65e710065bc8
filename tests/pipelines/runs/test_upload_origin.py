"""Versions of other origin on an instance: they are neither taken in silence nor lost."""

from __future__ import annotations

import copy

import pytest

from components import contract
from pipelines.compile import compiled_by

OTHER = "9.9.9 0123456789ab"


@pytest.fixture
def pipeline_id(uploaded, instance):
    [version] = instance.store.versions.values()
    assert version["display_name"] == uploaded
    return version["pipeline_id"]


@pytest.fixture
def add(instance, compiled, pipeline_id):
    """Upload another version, by the mark of the Flotilla that has compiled it, or by none."""

    def added(name, mark):
        spec = copy.deepcopy(dict(compiled.spec))
        container = spec["deploymentSpec"]["executors"]["exec-resolve-config"]["container"]
        container["args"][-2:] = [contract.OPTION, mark] if mark else []
        return instance.store.add_version(pipeline_id, name, "", spec)

    return added


def the_run_of(instance):
    *_, run = instance.store.runs.values()
    reference = run["pipeline_version_reference"]
    return instance.store.versions[reference["pipeline_version_id"]]["display_name"]


def test_ours_has_the_mark_of_this_code(compiled):
    assert compiled_by(compiled.spec) == contract.mark()
    assert compiled_by({"pipeline_spec": compiled.spec, "platform_spec": {}}) == contract.mark()
    assert compiled_by(None) == compiled_by({"root": {}}) == ""


def test_submit_says_which_version_it_used(instance, remote, uploaded):
    answer = remote("submit", "--json")
    [version] = instance.store.versions.values()
    used = {"name": uploaded, "id": version["pipeline_version_id"]}
    assert used.items() <= answer.json["version"].items()
    assert f"version {uploaded} ({used['id']}) of flotilla-training\n" in answer.err
    assert "flotilla: " not in answer.err


BY_HAND = "no mark of Flotilla: it was uploaded by hand"
MARKS = pytest.mark.parametrize(
    ("mark", "origin"),
    [("", BY_HAND), (OTHER, "compiled by Flotilla 9.9.9 (steps 0123456789ab)")],
    ids=["hand", "other"],
)


@MARKS
def test_a_newer_version_of_others_is_named_and_not_taken(instance, remote, add, mark, origin):
    [uploaded] = [each["display_name"] for each in instance.store.versions.values()]
    add("by-hand", mark)
    answer = remote("submit")
    assert (answer.code, the_run_of(instance)) == (0, uploaded)
    assert "flotilla: the newest version is by-hand, which " in answer.err
    assert origin in answer.err
    assert (
        remote("schedule", "--every", "6h", "--json").json["schedule"]["version"]["name"]
        == uploaded
    )
    assert remote("submit", "--version", "by-hand").code == 0
    assert the_run_of(instance) == "by-hand"
    # One that is named by a person needs no remark.
    assert "the newest version" not in remote("submit", "--version", uploaded).err


@MARKS
def test_without_a_version_of_ours_the_newest_is_taken_and_named(
    instance, remote, add, mark, origin
):
    instance.store.versions.clear()
    add("by-hand", mark)
    answer = remote("submit")
    assert (answer.code, the_run_of(instance)) == (0, "by-hand")
    assert f"flotilla: it {'has' if not mark else 'was'} " in answer.err
    assert origin in answer.err
    assert f"and this is {contract.in_words(contract.mark())}" in answer.err


@MARKS
def test_a_schedule_of_the_newest_says_that_it_is_of_others(instance, remote, add, mark, origin):
    quiet = remote("schedule", "--every", "6h", "--latest", "--name", "first")
    assert "whoever uploads it" in quiet.err
    assert "flotilla: " not in quiet.err
    add("by-hand", mark)
    answer = remote("schedule", "--every", "6h", "--latest", "--json")
    assert answer.json["schedule"]["version"]["name"] == "by-hand"
    assert "flotilla: now that is by-hand, which " in answer.err
    assert origin in answer.err
    *_, made = instance.store.recurring.values()
    assert "pipeline_version_id" not in made["pipeline_version_reference"]


def test_an_older_version_of_ours_is_found_behind_many_of_others(instance, remote, uploaded, add):
    for number in range(12):
        add(f"by-hand-{number}", "")
    assert remote("submit").code == 0
    assert the_run_of(instance) == uploaded


def test_uploading_ours_again_behind_one_of_others_says_so(remote, uploaded, add):
    add("by-hand", "")
    answer = remote("upload", "--json")
    assert (answer.json["version"]["name"], answer.json["version"]["newest"]) == (uploaded, True)
    assert "flotilla: the newest version is by-hand" in answer.err
