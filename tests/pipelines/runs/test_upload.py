"""`flotilla upload`: one version for each content, whoever comes first."""

from __future__ import annotations

import re

import pytest

from components.image import IMAGE
from pipelines.compile import package_of
from trainer.promotion import lineage

MINE = "registry.example.com/flotilla:9"
REMARK = (
    f"flotilla: no cluster can pull {IMAGE}, which names no registry: "
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
    digest = package_of(None, "").digest
    assert names(instance) == [f"{digest}-0123456-dirty"]
    [pipeline] = instance.store.pipelines.values()
    assert pipeline["display_name"] == "flotilla-training"
    assert answer.json["version"]["created"] is True
    assert answer.json["version"]["name"] == names(instance)[0]
    assert answer.json["artifacts"] == {}
    assert f"no link: {instance.url} serves no user interface; name it by --ui" in answer.err
    assert "uploaded: flotilla-training version" in answer.err


def test_the_same_content_is_there_once_whatever_the_commit(instance, remote, monkeypatch):
    remote("upload")
    monkeypatch.setenv(lineage.COMMIT, "fedcba9876543210")
    answer = remote("upload", "--json")
    assert (answer.code, answer.json["version"]["created"]) == (0, False)
    assert "the same content exists already" in answer.err
    assert len(names(instance)) == 1
    assert len(instance.asked("POST .*upload_version")) == 1


def test_another_image_is_another_version(instance, remote):
    remote("upload")
    answer = remote("upload", "--image", "registry.example.com/flotilla:9", "--json")
    assert answer.json["version"]["created"] is True
    assert len(names(instance)) == 2
    assert len(instance.store.pipelines) == 1
    newest = list(instance.store.versions.values())[-1]
    parameters = newest["pipeline_spec"]["pipeline_spec"]["root"]["inputDefinitions"]["parameters"]
    assert parameters["image"]["defaultValue"] == "registry.example.com/flotilla:9"


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
    # What was asked is done, and answered as what another one has done.
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
    """Return how many versions each request asks for at most."""
    found = (re.search(r"page_size=(\d+)", each) for each in instance.asked("GET .*/versions"))
    return [int(each[1]) for each in found]


def test_of_many_versions_few_are_asked_for(instance, remote, uploaded):
    [version] = instance.store.versions.values()
    for number in range(250):
        more = {**version, "pipeline_version_id": f"id-{number}", "display_name": f"v{number}"}
        instance.store.versions[f"id-{number}"] = {**more, "created_at": "2026-05-05T00:00:00Z"}
    answer = remote("upload", "--json")
    assert answer.json["version"]["name"] == uploaded
    # Each comes with its whole spec.
    assert sizes(instance) == [5, 1]
    instance.requests.clear()
    answer = remote("upload", "--image", MINE, "--json")
    assert answer.json["version"]["created"] is True
    assert sizes(instance) == [5, 1]


def test_names_that_hold_the_digest_are_read_over_pages(instance, remote, uploaded):
    [version] = instance.store.versions.values()
    for number in range(7):
        more = {**version, "pipeline_version_id": f"id-{number}"}
        more |= {"display_name": f"copy-{number}-of-{uploaded}"}
        instance.store.versions[f"id-{number}"] = {**more, "created_at": "2026-05-05T00:00:00Z"}
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
        f"it is not the newest: `submit` and `schedule` take {newer}, or this one by "
        f"--version {older}"
    )
    # What the line says is what happens.
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
    assert f"take {first}, or this one" in answer.err


def test_what_is_uploaded_stays_when_the_last_look_fails(instance, remote):
    instance.faults.add("GET .*page_size=1&", 500, times=1)
    answer = remote("upload", "--json")
    assert (answer.code, answer.json["status"]) == (1, "failed")
    assert answer.err.startswith("uploaded: ")
    answer = remote("upload", "--json")
    assert (answer.json["version"]["created"], answer.json["version"]["newest"]) == (False, True)


def test_a_version_that_is_gone_at_once(instance, remote):
    instance.faults.add("GET .*page_size=1&", 200, body=b"{}")
    answer = remote("upload", "--json")
    assert (answer.code, answer.json["version"]["newest"]) == (0, True)


def test_where_pipelines_are_kept_in_kubernetes(instance, remote):
    instance.pipeline_store = "kubernetes"
    # It is found by a part of its name, and this is another.
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


def test_another_image_is_not_remarked_on(remote, tmp_path):
    assert "registry" not in remote("upload", "--image", MINE).err.replace(MINE, "")
    (tmp_path / "other.yaml").write_text(OTHER)
    assert "registry" not in remote("upload", tmp_path / "other.yaml").err


@pytest.mark.parametrize("root", ["[]", "{inputDefinitions: {parameters: {image: 5}}}",
                                  "{inputDefinitions: {parameters: {image: {}}}}"])  # fmt: skip
def test_a_pipeline_without_a_default_image(remote, tmp_path, root):
    (tmp_path / "p.yaml").write_text(OTHER.replace("{dag: {tasks: {}}}", root))
    answer = remote("upload", tmp_path / "p.yaml")
    assert (answer.code, REMARK in answer.err) == (0, False)


def test_in_a_namespace(instance, remote):
    instance.multi_user = True
    assert remote("upload", "--namespace", "me").code == 0
    [pipeline] = instance.store.pipelines.values()
    assert pipeline["namespace"] == "me"


@pytest.mark.parametrize(
    ("name", "content", "answer"),
    [
        ("none.yaml", None, (2, "cannot read")),
        ("p.zip", b"PK", (2, "does not end with .yaml")),
        ("p.yaml", b"a: [", (2, "holds no compiled pipeline")),
        ("p.yaml", b"", (2, "holds no compiled pipeline")),
        ("p.yaml", b"\xff\xfe", (2, "holds no compiled pipeline")),
        ("p.yaml", b"- 1", (2, "holds no compiled pipeline")),
        ("p.yaml", b"pipelineInfo: {name: 5}\nroot: {}", (2, "holds no compiled pipeline")),
    ],
)
def test_what_is_no_pipeline(remote, tmp_path, name, content, answer):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    found = remote("upload", tmp_path / name)
    assert (found.code, found.err.count("\n")) == (answer[0], 1)
    assert answer[1] in found.err


def test_an_image_for_what_is_compiled(remote, tmp_path):
    (tmp_path / "p.yaml").write_text(OTHER)
    answer = remote("upload", tmp_path / "p.yaml", "--image", "a:b")
    assert (answer.code, "omit one" in answer.err) == (2, True)


def test_no_image(remote):
    answer = remote("upload", "--image", "A B")
    assert (answer.code, "is not the name of an image" in answer.err) == (2, True)


def test_a_blank_name(instance, remote):
    answer = remote("upload", "--name", "  ")
    assert (answer.code, "--name is blank" in answer.err) == (2, True)
    assert not instance.requests
