"""Tests that `flotilla upload` keeps one version per content, even with concurrent uploads."""

import copy
import json
import re
import shlex
from pathlib import Path
from urllib.parse import quote, unquote_plus

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from flotilla.components.image import IMAGE, MARK_OPTION, describe_mark, own_mark
from flotilla.pipelines.compile import own_package, read_mark
from flotilla.pipelines.runs.kfp_access import Access
from flotilla.pipelines.runs.kfp_client import connect, containing, equals
from flotilla.pipelines.runs.submission import experiment_id, find_or_upload, find_pipeline_id
from flotilla.trainer.promotion import lineage
from tests.kfp_instance.server import Instance

MINE = "registry.example.com/flotilla:9"
REMARK = (
    f"flotilla: warning: no cluster can pull {IMAGE}, because its name has no registry: "
    "compile or upload with --image HOST/NAME:TAG\n"
)
OTHER = """\
pipelineInfo: {name: other}
root: {dag: {tasks: {}}}
schemaVersion: 2.1.0
"""


@pytest.fixture(autouse=True)
def _commit(monkeypatch):
    monkeypatch.setenv(lineage.COMMIT, "0123456789abcdef-dirty")


def names(instance):
    return [version["display_name"] for version in instance.store.versions.values()]


def test_the_first_upload_makes_the_pipeline_and_a_version_named_by_content_and_commit(
    instance, remote
):
    answer = remote("upload", "--json")
    assert answer.code == 0
    digest = own_package().digest
    assert names(instance) == [f"{digest}-0123456-dirty"]
    [pipeline] = instance.store.pipelines.values()
    assert pipeline["display_name"] == "flotilla-training"
    assert answer.json["version"]["created"] is True
    assert answer.json["version"]["name"] == names(instance)[0]
    assert answer.json["artifacts"] == {}
    said = f"no link: {instance.url} serves only the API; set the URL of the user interface"
    assert said in answer.err
    assert "uploaded: flotilla-training version" in answer.err


def test_the_same_content_is_there_once_and_another_image_is_another_version(
    instance, remote, monkeypatch
):
    remote("upload")
    monkeypatch.setenv(lineage.COMMIT, "fedcba9876543210")
    answer = remote("upload", "--json")
    assert (answer.code, answer.json["version"]["created"]) == (0, False)
    assert "identical content was already uploaded" in answer.err
    assert len(names(instance)) == 1
    assert len(instance.asked("POST .*upload_version")) == 1
    answer = remote("upload", "--image", MINE, "--json")
    assert answer.json["version"]["created"] is True
    assert (len(names(instance)), len(instance.store.pipelines)) == (2, 1)
    newest = list(instance.store.versions.values())[-1]
    parameters = newest["pipeline_spec"]["pipeline_spec"]["root"]["inputDefinitions"]["parameters"]
    assert parameters["image"]["defaultValue"] == MINE


def test_a_file_under_another_name(instance, remote, tmp_path):
    file = tmp_path / "other.yaml"
    file.write_text(OTHER)
    assert remote("upload", file).code == 0
    assert remote("upload", file, "--name", "mine").code == 0
    found = {each["display_name"] for each in instance.store.pipelines.values()}
    assert found == {"other", "mine"}


def test_a_pipeline_left_without_a_version_gets_one(instance, remote):
    instance.faults.add("POST .*upload_version", 503, times=1)
    assert remote("upload").code == 1
    assert len(instance.store.pipelines) == 1
    assert remote("upload").code == 0
    assert len(names(instance)) == 1
    assert len(instance.store.pipelines) == 1


@pytest.mark.parametrize("path", ["POST .*/pipelines$", "POST .*upload_version"])
def test_somebody_who_was_faster_has_done_our_work(instance, remote, path):
    # The request was executed, but the response reports a conflict with another client.
    instance.faults.add(path, 409, times=1, late=True)
    answer = remote("upload")
    assert answer.code == 0
    assert len(names(instance)) == 1


def test_a_conflict_without_a_cause_is_reported(instance, remote):
    instance.faults.add("POST .*upload_version", 409)
    answer = remote("upload")
    assert answer.code == 1
    assert "answered 409" in answer.err
    assert answer.err.count("\n") == 1


def sizes(instance):
    """Return the page size of each request for versions."""
    found = (re.search(r"page_size=(\d+)", each) for each in instance.asked("GET .*/versions"))
    return [int(each[1]) for each in found]


def test_of_many_versions_few_are_asked_for(instance, remote, uploaded):
    more_versions(instance, *(f"v{number}" for number in range(250)))
    answer = remote("upload", "--json")
    assert answer.json["version"]["name"] == uploaded
    # Lists are short, because each version in a list includes its complete spec.
    assert sizes(instance) == [5, 1]
    instance.requests.clear()
    answer = remote("upload", "--image", MINE, "--json")
    assert answer.json["version"]["created"] is True
    assert sizes(instance) == [5, 1]


def test_names_that_hold_the_digest_are_read_over_pages(instance, remote, uploaded):
    more_versions(instance, *(f"copy-{number}-of-{uploaded}" for number in range(7)))
    answer = remote("upload", "--json")
    assert answer.json["version"]["name"] == uploaded
    assert sizes(instance) == [5, 5, 1]


def test_what_was_uploaded_now_is_the_newest(remote):
    for image in ((), ("--image", MINE)):
        answer = remote("upload", *image, "--json")
        assert (answer.json["version"]["created"], answer.json["version"]["newest"]) == (True, True)
        assert "newest" not in answer.err


@pytest.mark.slow
def test_the_content_of_an_older_version_is_not_the_newest(instance, remote):
    older = remote("upload", "--json").json["version"]["name"]
    newer = remote("upload", "--image", MINE, "--json").json["version"]["name"]
    answer = remote("upload", "--json")
    assert (answer.code, answer.json["version"]["name"]) == (0, older)
    assert (answer.json["version"]["created"], answer.json["version"]["newest"]) == (False, False)
    [line] = [line for line in answer.err.splitlines() if "newest" in line]
    assert line == (
        f"this version is not the newest: `submit` and `schedule` use {newer}; to use this "
        f"version, add --version {older}"
    )
    # The submitted version must be the one in the printed line.
    remote("submit")
    remote("submit", "--version", older)
    ids = {each["pipeline_version_id"]: name for name, each in zip(
        names(instance), instance.store.versions.values(), strict=True)}  # fmt: skip
    taken = [run["pipeline_version_reference"]["pipeline_version_id"]
             for run in instance.store.runs.values()]  # fmt: skip
    assert [ids[each] for each in taken] == [newer, older]
    answer = remote("upload", "--image", MINE, "--json")
    assert (answer.json["version"]["created"], answer.json["version"]["newest"]) == (False, True)
    assert "newest" not in answer.err


@pytest.mark.slow
def test_of_two_in_one_second_the_instance_says_which_is_newest(instance, remote, monkeypatch):
    monkeypatch.setattr(instance.store, "_now", lambda: "2026-01-02T03:04:05Z")
    first = remote("upload", "--json").json["version"]["name"]
    answer = remote("upload", "--image", MINE, "--json")
    assert (answer.json["version"]["created"], answer.json["version"]["newest"]) == (True, False)
    assert f"`submit` and `schedule` use {first}; to use this version" in answer.err


def test_what_is_uploaded_stays_when_the_last_look_fails_or_finds_nothing(instance, remote):
    instance.faults.add("GET .*page_size=1&", 500, times=1)
    answer = remote("upload", "--json")
    assert (answer.code, answer.json["status"]) == (1, "failed")
    assert answer.err.startswith("uploaded: ")
    answer = remote("upload", "--json")
    assert (answer.json["version"]["created"], answer.json["version"]["newest"]) == (False, True)
    # The version is gone at once.
    instance.faults.add("GET .*page_size=1&", 200, body=b"{}")
    answer = remote("upload", "--json")
    assert (answer.code, answer.json["version"]["newest"]) == (0, True)


def test_where_pipelines_are_kept_in_kubernetes(instance, remote):
    instance.pipeline_store = "kubernetes"
    # The filter matches parts of names, so it also finds this other pipeline.
    instance.store.create_pipeline({"display_name": "flotilla-training-2"})
    assert remote("upload").code == 0
    assert remote("upload").code == 0
    [version] = instance.store.versions.values()
    for words in ((), ("--version", version["display_name"][:6])):
        assert remote("submit", *words).code == 0
    assert len(instance.store.runs) == 2


def test_the_default_image_is_remarked_on(remote, tmp_path):
    answer = remote("upload", "--json")
    assert answer.err.endswith(REMARK)
    assert len(answer.out.splitlines()) == 1
    assert answer.json["status"] == "done"
    assert REMARK in remote("upload").err
    remote("compile", "-o", tmp_path / "ours.yaml")
    assert REMARK in remote("upload", tmp_path / "ours.yaml").err
    assert "registry" not in remote("upload", "--image", MINE).err.replace(MINE, "")


@pytest.mark.parametrize("root", ["{dag: {tasks: {}}}", "[]",
                                  "{inputDefinitions: {parameters: {image: 5}}}",
                                  "{inputDefinitions: {parameters: {image: {}}}}"])  # fmt: skip
def test_a_pipeline_without_a_default_image(remote, tmp_path, root):
    (tmp_path / "p.yaml").write_text(OTHER.replace("{dag: {tasks: {}}}", root))
    answer = remote("upload", tmp_path / "p.yaml")
    assert (answer.code, "registry" in answer.err) == (0, False)


def test_in_a_namespace(instance, remote):
    instance.multi_user = True
    assert remote("upload", "--namespace", "me").code == 0
    [pipeline] = instance.store.pipelines.values()
    assert pipeline["namespace"] == "me"


@pytest.mark.parametrize(
    ("words", "content", "message"),
    [
        (("p.yaml", "--image", "a:b"), OTHER, "omit the option"),
        (("--image", "A B"), OTHER, "is not the name of an image"),
        (("--name", "  "), OTHER, "--name is blank"),
        (("p.yaml",), "pipelineInfo: {name: 5}\nroot: {}", "does not contain a compiled pipeline"),
        (("p.yaml",), "pipelineInfo: [", "does not contain a compiled pipeline"),
    ],
)
def test_what_is_invalid_is_refused_without_a_request(instance, remote, words, content, message):
    Path("p.yaml").write_text(content)
    answer = remote("upload", *words)
    assert (answer.code, answer.err.count("\n"), message in answer.err) == (2, 1, True)
    assert not instance.requests


ORIGIN_OTHER = "9.9.9 0123456789ab"


@pytest.fixture
def pipeline_id(uploaded, instance):
    [version] = instance.store.versions.values()
    assert version["display_name"] == uploaded
    return version["pipeline_id"]


@pytest.fixture
def add(instance, compiled, pipeline_id):
    """Return a function that uploads a version with the mark of a given Flotilla, or none."""

    def added(name, mark):
        spec = copy.deepcopy(dict(compiled.spec))
        container = spec["deploymentSpec"]["executors"]["exec-prepare-data"]["container"]
        container["args"][-2:] = [MARK_OPTION, mark] if mark else []
        return instance.store.add_version(pipeline_id, name, "", spec)

    return added


def the_run_of(instance):
    *_, run = instance.store.runs.values()
    reference = run["pipeline_version_reference"]
    return instance.store.versions[reference["pipeline_version_id"]]["display_name"]


def test_ours_has_the_mark_of_this_code(compiled):
    assert read_mark(compiled.spec) == own_mark()
    assert read_mark({"pipeline_spec": compiled.spec, "platform_spec": {}}) == own_mark()
    assert read_mark(None) == read_mark({"root": {}}) == ""


def test_submit_says_which_version_it_used(instance, remote, uploaded):
    answer = remote("submit", "--json")
    [version] = instance.store.versions.values()
    used = {"name": uploaded, "id": version["pipeline_version_id"]}
    assert used.items() <= answer.json["version"].items()
    assert f"version {uploaded} ({used['id']}) of flotilla-training\n" in answer.err
    assert "flotilla: " not in answer.err


BY_HAND = "has no mark of Flotilla (it was uploaded by hand"
MARKS = pytest.mark.parametrize(
    ("mark", "origin"),
    [("", BY_HAND), (ORIGIN_OTHER, "compiled by Flotilla 9.9.9 (steps 0123456789ab)")],
    ids=["hand", "other"],
)


@MARKS
def test_a_newer_version_of_others_is_named_and_not_taken(instance, remote, add, mark, origin):
    [uploaded] = [each["display_name"] for each in instance.store.versions.values()]
    add("by-hand", mark)
    answer = remote("submit")
    assert (answer.code, the_run_of(instance)) == (0, uploaded)
    assert "flotilla: warning: the newest version is by-hand, which " in answer.err
    assert origin in answer.err
    scheduled = remote("schedule", "--every", "6h", "--json").json["schedule"]
    assert scheduled["version"]["name"] == uploaded
    assert remote("submit", "--version", "by-hand").code == 0
    assert the_run_of(instance) == "by-hand"
    assert "the newest version" not in remote("submit", "--version", uploaded).err


@MARKS
def test_without_a_version_of_ours_the_newest_is_taken_and_named(
    instance, remote, add, mark, origin
):
    instance.store.versions.clear()
    add("by-hand", mark)
    answer = remote("submit")
    assert (answer.code, the_run_of(instance)) == (0, "by-hand")
    assert "flotilla: warning: version by-hand " in answer.err
    assert origin in answer.err
    assert f"but this is {describe_mark(own_mark())}" in answer.err


@MARKS
def test_a_schedule_of_the_newest_says_that_it_is_of_others(instance, remote, add, mark, origin):
    quiet = remote("schedule", "--every", "6h", "--latest", "--name", "first")
    assert "the version that is newest when it starts" in quiet.err
    assert "flotilla: " not in quiet.err
    add("by-hand", mark)
    answer = remote("schedule", "--every", "6h", "--latest", "--json")
    assert answer.json["schedule"]["version"]["name"] == "by-hand"
    assert "flotilla: warning: the newest version is now by-hand, which " in answer.err
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
    assert "flotilla: warning: the newest version is by-hand" in answer.err


def more_versions(instance, *names):
    """Add versions, each newer than the previous one."""
    [version] = instance.store.versions.values()
    for number, name in enumerate(names):
        more = {**version, "pipeline_version_id": f"id-{number}", "display_name": name}
        more["created_at"] = f"2026-05-05T00:{number // 60:02}:{number % 60:02}Z"
        instance.store.versions[f"id-{number}"] = more


def taken(instance):
    [run] = instance.store.runs.values()
    instance.store.runs.clear()
    return run["pipeline_version_reference"]["pipeline_version_id"]


@pytest.mark.parametrize(
    ("names", "wanted", "expected"),
    [
        (("a", "b", "c"), "", ("id-2", r"page_size=1&")),
        # An id is one request.
        (("a", "b"), "ID", ("", r"/versions/[^/?]+$")),
        # A whole name comes before a beginning, and of several beginnings the newest is taken.
        (("v1", *(f"v1{number}" for number in range(9))), "v1", ("id-0", "")),
        (("v1", *(f"v1{number}" for number in range(9))), "v", ("id-9", "")),
        # This name looks like an id.
        (("01234567-0123-0123-0123-0123456789ab",), "01234567-0123-0123-0123-0123456789ab",
         ("id-0", "")),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("uploaded")
def test_which_version_is_taken_and_asked_for(instance, remote, names, wanted, expected):
    version, pattern = expected
    [first] = instance.store.versions
    more_versions(instance, *names)
    words = ("--version", first if wanted == "ID" else wanted) if wanted else ()
    assert remote("submit", *words).code == 0
    assert taken(instance) == (version or first)
    requests = instance.asked("GET .*/versions")
    assert not pattern or [bool(re.search(pattern, each)) for each in requests] == [True]


@pytest.mark.usefixtures("uploaded")
def test_the_version_of_another_pipeline_is_none_of_this_one(instance, remote, compiled):
    other = instance.store.create_pipeline({"display_name": "other"})
    version = instance.store.add_version(other["pipeline_id"], "v", "", dict(compiled.spec))
    answer = remote("submit", "--version", version["pipeline_version_id"])
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "has no version" in answer.err


@pytest.mark.usefixtures("uploaded")
def test_a_version_is_guessed_among_the_newest(instance, remote):
    more_versions(instance, *(f"release-{number}" for number in range(40)))
    answer = remote("submit", "--version", "relaese-39")
    assert (answer.code, "did you mean 'release-39'?" in answer.err) == (2, True)
    answer = remote("submit", "--version", "zzz")
    assert (answer.code, "the newest is release-39" in answer.err) == (2, True)
    assert all("page_size=100" not in each for each in instance.asked("GET .*/versions"))


@pytest.mark.usefixtures("uploaded")
def test_a_pipeline_without_a_version(instance, remote):
    instance.store.versions.clear()
    for words in ((), ("--version", "v")):
        answer = remote("submit", *words)
        assert (answer.code, answer.err.count("\n")) == (2, 1)
        assert "has no version: upload one with `flotilla upload`" in answer.err


def test_an_older_version_is_sent_nothing_that_it_does_not_know(instance, remote, uploaded):
    [version] = instance.store.versions.values()
    del version["pipeline_spec"]["root"]["inputDefinitions"]["parameters"]["gpus"]
    answer = remote("submit")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert f"version {uploaded} of flotilla-training has no parameter gpus: upload" in answer.err
    assert not instance.store.runs


NAMES = (
    "a+b", "100%", "50%25 of it", 'say "hello"', "it's mine", "two words", "größer als 早い",
    "a&b=c#d?e/f", "back\\slash", "\\\\", "under_score", '"stringValue":1',
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_one_name_is_one_thing_in_every_command(instance, remote, compiled, tmp_path, name):
    file = tmp_path / "ours.yaml"
    file.write_text(compiled.text)
    # A wrong filter would find this pipeline instead.
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
    assert (absent.code, absent.err.count("\n")) == (2, 1)
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


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1))
@example(name="%2B")
@example(name="\\%_")
def test_any_text_is_a_name(served, compiled, name):
    if not name.strip():
        return
    client = connect(Access(endpoint=served.url))
    first, made = find_or_upload(client, compiled, name)
    assert made is (name not in _seen)
    _seen.add(name)
    assert find_or_upload(client, compiled, name) == (first, False)
    assert find_pipeline_id(client, name) == first.pipeline_id
    assert experiment_id(client, name) == experiment_id(client, name)


_seen: set[str] = set()


@pytest.mark.parametrize("made", [equals, containing])
def test_a_filter_is_encoded_once_more_than_the_rest_of_a_query(made):
    sent = made("display_name", "a+b %")
    assert not set(sent) & set('+ "{}')
    [predicate] = json.loads(unquote_plus(sent))["predicates"]
    assert predicate["stringValue"] == "a+b %"
    assert quote(unquote_plus(sent), safe="") == sent
