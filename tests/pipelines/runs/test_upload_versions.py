"""Which version of an uploaded pipeline a run takes, and how much is asked for to find it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("uploaded")


def the_run(instance):
    [run] = instance.store.runs.values()
    return run


def test_a_version_by_name_by_its_beginning_and_by_id(instance, remote, uploaded):
    [version] = instance.store.versions.values()
    for wanted in (uploaded, uploaded[:12], version["pipeline_version_id"]):
        assert remote("submit", "--version", wanted).code == 0
    assert len(instance.store.runs) == 3


def more_versions(instance, *names):
    """Add versions, each newer than the ones before it."""
    [version] = instance.store.versions.values()
    for number, name in enumerate(names):
        more = {**version, "pipeline_version_id": f"id-{number}", "display_name": name}
        more["created_at"] = f"2026-05-05T00:00:{number:02}Z"
        instance.store.versions[f"id-{number}"] = more


def taken(instance):
    """Return the id of the version that the only run has, and forget the run."""
    run = the_run(instance)
    instance.store.runs.clear()
    return run["pipeline_version_reference"]["pipeline_version_id"]


def test_of_the_newest_version_alone_the_spec_is_asked_for(instance, remote):
    more_versions(instance, "a", "b", "c")
    assert remote("submit").code == 0
    assert taken(instance) == "id-2"
    [request] = instance.asked("GET .*/versions")
    assert "page_size=1&" in request


def test_a_version_by_its_id_is_one_request(instance, remote):
    version = next(iter(instance.store.versions))
    more_versions(instance, "a", "b")
    assert remote("submit", "--version", version).code == 0
    assert taken(instance) == version
    [request] = instance.asked("GET .*/versions")
    assert request.endswith(f"/versions/{version}")


def test_a_whole_name_comes_before_a_beginning(instance, remote):
    more_versions(instance, "v1", *(f"v1{number}" for number in range(9)))
    assert remote("submit", "--version", "v1").code == 0
    assert taken(instance) == "id-0"
    assert remote("submit", "--version", "v").code == 0
    # Of those that begin so, the newest.
    assert taken(instance) == "id-9"


def test_a_name_that_looks_like_an_id(instance, remote):
    name = "01234567-0123-0123-0123-0123456789ab"
    more_versions(instance, name)
    assert remote("submit", "--version", name).code == 0
    assert taken(instance) == "id-0"


def test_the_version_of_another_pipeline_is_none_of_this_one(instance, remote, compiled):
    other = instance.store.create_pipeline({"display_name": "other"})
    version = instance.store.add_version(other["pipeline_id"], "v", "", dict(compiled.spec))
    answer = remote("submit", "--version", version["pipeline_version_id"])
    assert (answer.code, answer.err.count("\n")) == (1, 1)
    assert "has no version" in answer.err


def test_a_version_is_guessed_among_the_newest(instance, remote):
    more_versions(instance, *(f"release-{number}" for number in range(40)))
    answer = remote("submit", "--version", "relaese-39")
    assert (answer.code, "did you mean 'release-39'?" in answer.err) == (1, True)
    answer = remote("submit", "--version", "zzz")
    assert (answer.code, "newest: release-39" in answer.err) == (1, True)
    assert all("page_size=100" not in each for each in instance.asked("GET .*/versions"))


def test_a_pipeline_without_a_version(instance, remote):
    instance.store.versions.clear()
    for words in ((), ("--version", "v")):
        answer = remote("submit", *words)
        assert (answer.code, answer.err.count("\n")) == (1, 1)
        assert "has no version: upload one with `flotilla upload`" in answer.err


def older(instance):
    """Take a parameter away from the uploaded version."""
    [version] = instance.store.versions.values()
    del version["pipeline_spec"]["root"]["inputDefinitions"]["parameters"]["training_patience"]


def test_an_older_version_gets_what_it_knows(instance, remote, uploaded):
    older(instance)
    assert remote("submit").code == 0
    assert "training_patience" not in the_run(instance)["runtime_config"]["parameters"]
    answer = remote("submit", "--set", "training.patience=3")
    assert answer.code == 2
    assert f"version {uploaded} of flotilla-training does not know training_patience" in answer.err
    assert len(instance.store.runs) == 1
