"""Tests that connection errors are reported in one line, without a long wait."""

import json
import re
import socket
import subprocess
from contextlib import suppress
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import ProxyHandler, build_opener

import pytest

from flotilla.pipelines.runs import kfp_client as instances
from flotilla.pipelines.runs.kfp_access import Access
from flotilla.pipelines.runs.kfp_client import InstanceError, health
from tests.kfp_instance.store import Store
from tests.planted import SECRETS, found_in, plant

SECRET = "ey-secret-0123456789"
JSON = {"Content-Type": "application/json"}
EVERY = (
    ("upload",), ("submit",), ("schedule", "--every", "1h"), ("unschedule", "x"), ("runs",),
    ("status", "x"), ("logs", "x"), ("cancel", "x"),
)  # fmt: skip


def in_one_line(answer, *words):
    assert answer.code == 1
    assert (answer.out, answer.err.count("\n")) == ("", 1)
    for word in words:
        assert word in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (400, "fix the reported problem"),
        (401, "renew the token or cookies"),
        (403, "but denies the request: add --namespace"),
        (404, "check the name or id and --endpoint"),
        (405, "is not the URL of a KFP API"),
        (409, "check the object, and try again"),
        (413, "too large"),
        (418, "check --endpoint"),
        (429, "try again later"),
        (500, "try again, or ask its owner"),
        (503, "try again, or ask its owner"),
    ],
)
def test_a_status(instance, remote, status, remedy):
    instance.faults.add(".", status)
    in_one_line(remote("runs"), f"{instance.url} answered {status}", remedy, "/v2beta1/runs")


@pytest.mark.parametrize("words", EVERY, ids=lambda words: words[0])
def test_every_command_reports_a_refusal_in_one_line(instance, remote, words):
    instance.token = "right"
    in_one_line(remote(*words), "answered 401", "renew the token")
    answer = remote(*words, "--json")
    assert answer.json["status"] == "failed"
    assert "answered 401" in answer.json["message"]


@pytest.mark.parametrize("words", [("runs",), ("upload",)], ids=lambda words: words[0])
def test_a_login_page_is_reported(instance, remote, words):
    instance.faults.add(".", 200, body=b"<!doctype html><html>Sign in</html>")
    in_one_line(remote(*words), "text/html instead of JSON, perhaps a login page")


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("https://login.example.com/auth?a=1", "redirects to https://login.example.com to log in:"),
        ("/dex/auth?client=x", "it redirects to /dex/auth, perhaps a login"),
        ("TLS/", "it redirects to TLS: use https:// in --endpoint"),
    ],
)
def test_a_redirect_is_not_followed(instance, remote, location, words):
    place = instance.url.replace("http:", "https:")
    headers = {"Location": location.replace("TLS", place)}
    instance.faults.add(".", 302, headers=headers, body=b"see other")
    in_one_line(remote("runs"), "answered 302", words.replace("TLS", place))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        *((each, "like a KFP instance") for each in (b"[1, 2]", b'"ok"', b"17")),
        (b'{"runs": 5}', "the KFP client cannot read"),
        (b'{"runs": [{"created_at": "soon"}]}', "the KFP client cannot read"),
    ],
)
def test_json_of_another_kind(instance, remote, body, words):
    instance.faults.add(".", 200, body=body, headers=JSON)
    in_one_line(remote("runs"), words)


def test_words_of_the_instance_or_a_proxy_are_short_and_a_web_page_is_left_out(instance, remote):
    body = json.dumps({"message": "first line\nstack of calls " * 99}).encode()
    instance.faults.add(".", 400, body=body, times=1)
    answer = remote("runs")
    in_one_line(answer, "(first line stack of calls")
    assert len(answer.err) < 700
    instance.faults.add(".", 400, body=b"Pipeline.Name length cannot exceed 128", times=1)
    in_one_line(remote("runs"), "(Pipeline.Name length cannot exceed 128)")
    instance.faults.add(".", 400, body=b"<html>secret form</html>")
    assert "secret" not in remote("runs").err


def test_what_is_read_is_asked_again_what_writes_is_not(instance, remote):
    instance.faults.add("GET .*/pipelines", 503, times=2)
    instance.faults.add("POST .*/pipelines", 503)
    in_one_line(remote("upload"), "answered 503", "POST /apis/v2beta1/pipelines")
    assert len(instance.asked("GET ")) == 3
    assert len(instance.asked("POST ")) == 1


def test_a_connection_that_breaks(instance, remote):
    instance.faults.add(".", 0)
    in_one_line(remote("runs"), "closed the connection during GET /apis/v2beta1/runs")


def test_nothing_listens_there(remote, monkeypatch, port):
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", f"http://127.0.0.1:{port}")
    in_one_line(remote("runs"), f"127.0.0.1:{port} refuses the connection", "port-forward")


def test_a_host_that_is_not_known(remote, outside_attempts, monkeypatch):
    def unknown(*_arguments, **_named):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    in_one_line(remote("runs", "--endpoint", "https://nowhere.invalid"), "is unknown")
    assert not outside_attempts


@pytest.mark.parametrize("words", [("runs",), ("upload",)], ids=lambda words: words[0])
@pytest.mark.parametrize(
    "case",
    [
        # On a busy machine, a shorter timeout could expire before the request is recorded.
        ("READ_SECONDS", 1.0, -1, ("does not respond", "try again")),
        # The server sends a byte now and then.
        ("WHOLE_SECONDS", 0.3, -2, ("takes too long to answer",)),
    ],
)
def test_a_server_that_hangs_is_left(instance, remote, monkeypatch, words, case):
    limit, seconds, fault, said = case
    monkeypatch.setattr(instances, limit, seconds)
    instance.faults.add(".", fault)
    in_one_line(remote(*words), *said)
    assert len(instance.requests) == 1 or limit == "WHOLE_SECONDS"


def test_all_tries_together_stay_below_thirty_seconds():
    retries = instances.connect(Access(endpoint="http://127.0.0.1:9"))._existing_config.retries
    assert retries.read == 0
    tries = 1 + retries.total
    pauses = sum(retries.backoff_factor * 2**number for number in range(tries))
    known = tries * instances.CONNECT_SECONDS + instances.READ_SECONDS + pauses
    assert known < instances.WHOLE_SECONDS < 30


def certificate(folder):
    """Return a self-signed certificate for 127.0.0.1, and its key."""
    made, key = folder / "ca.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", key, "-out", made],
        check=True, capture_output=True,
    )  # fmt: skip
    return made, key


def test_tls_is_checked_against_the_ca_file(instance, remote, tmp_path, monkeypatch):
    made, key = certificate(tmp_path)
    (tmp_path / "other").mkdir()
    other, _ = certificate(tmp_path / "other")
    answer = remote("runs", "--endpoint", instance.url.replace("http:", "https:"))
    in_one_line(answer, "does not use TLS: check the port")
    instance.speak_tls(made, key)
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", instance.url)
    in_one_line(remote("runs"), "is not trusted", "pass its CA with --ca-file")
    in_one_line(remote("runs", "--ca-file", other), "is not trusted")
    assert remote("runs", "--ca-file", made).code == 0
    (tmp_path / "no.pem").write_text("no PEM certificate")
    in_one_line(remote("runs", "--ca-file", tmp_path / "no.pem"), "no.pem")


def test_the_version(instance):
    access = Access(endpoint=instance.url)
    assert health(access).version == "2.17.0"
    instance.faults.add("v2beta1/healthz", 200, body=b'{"multi_user": false}')
    assert health(access).version == "2.17.0"
    # An API without the older path keeps its version for itself.
    instance.faults.add("v1beta1/healthz", 404, times=1)
    assert health(access).version == ""
    instance.faults.add("v1beta1/healthz", 200, body=b"{}")
    assert health(access).version == ""
    instance.faults.clear()
    instance.faults.add("healthz", 403)
    with pytest.raises(InstanceError) as refused:
        health(access)
    assert (refused.value.status, refused.value.passing) == (403, False)


def test_the_home_folder_is_neither_read_nor_written(instance, remote, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    context = {"namespace": "theirs", "client_authentication_cookie": "theirs"}
    (home / "context.json").write_text(json.dumps(context))
    instance.cookies = "mine"
    in_one_line(remote("runs"), "answered 401")
    assert json.loads((home / "context.json").read_text()) == context
    assert remote("runs").err.count("\n") == 1


def test_credentials_reach_every_path(instance, remote, tmp_path, monkeypatch):
    (tmp_path / "token").write_text(f"{SECRET}\n")
    (tmp_path / "cookies").write_text("session=abc; other=d\n")
    instance.token, instance.cookies = SECRET, "session=abc; other=d"
    words = ["--token-file", tmp_path / "token", "--cookies-file", tmp_path / "cookies"]
    assert remote("upload", *words).code == 0
    assert remote("submit", *words).code == 0
    [run_id] = instance.store.runs
    instance.store.runs[run_id]["state"] = "SUCCEEDED"
    workflow = instance.store.workflows[run_id]
    workflow.begin("train_model")
    workflow.end("train_model")
    answer = remote("logs", run_id, *words)
    assert (answer.code, "done in" in answer.out) == (0, True)
    monkeypatch.setenv("KFP_EXISTING_TOKEN", SECRET)
    monkeypatch.setenv("KFP_COOKIES", "session=abc; other=d")
    assert remote("runs").code == 0


def test_a_token_that_is_renewed_meanwhile_is_taken(instance, remote, tmp_path, uploaded):
    file = tmp_path / "token"
    file.write_text("first")
    instance.token = "first"

    def renew(_workflow, run):
        file.write_text("second")
        instance.token = "second"
        run["state"] = "RUNNING"

    def over(_workflow, run):
        run["state"] = "SUCCEEDED"

    instance.store.play = [renew, over]
    root = f"storage.root={tmp_path.as_uri()}"
    answer = remote("submit", "--wait", "--token-file", file, "--set", root)
    assert (answer.code, bool(uploaded)) == (0, True), answer.err


@pytest.mark.parametrize("words", EVERY, ids=lambda words: words[0])
@pytest.mark.parametrize("flag", [(), ("--json",)], ids=["", "json"])
def test_no_secret_is_reported(instance, remote, monkeypatch, words, flag):
    # The instance's error message contains the unknown token.
    instance.token = "right"
    monkeypatch.setenv("KFP_EXISTING_TOKEN", SECRET)
    monkeypatch.setenv("KFP_COOKIES", f"session={SECRET}-cookie")
    answer = remote(*words, *flag)
    assert "***" in answer.err
    assert SECRET not in answer.err + answer.out
    instance.faults.add(".", 400, body=json.dumps({"message": f"x {SECRET}-cookie"}).encode())
    answer = remote(*words, *flag)
    assert "answered 400" in answer.err
    assert SECRET not in answer.err + answer.out


def test_no_option_takes_a_secret_in_clear(remote):
    words = remote("runs", "--help").out
    named = set(re.findall(r"--[a-z-]+", words))
    assert {"--token-file", "--cookies-file"} <= named
    assert not named & {"--token", "--cookies", "--existing-token", "--password"}


@pytest.fixture
def around(instance, remote, tmp_path, monkeypatch):
    """Plant all secrets; the instance requires token and cookies, and the endpoint has no user."""
    plant(tmp_path / "home", monkeypatch)
    instance.token, instance.cookies = SECRETS["token"], f"session={SECRETS['cookie']}"
    return remote


def written(instance, answers, folder):
    store = instance.store
    kept = [store.pipelines, store.versions, store.runs, store.recurring]
    texts = {str(each)[:60]: each for each in instance.received}
    texts |= {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    texts["kept"] = repr([*map(dict, kept)]).encode()
    for number, each in enumerate(answers):
        texts |= {f"out {number}": each.out.encode(), f"err {number}": each.err.encode()}
    return texts


def test_no_command_on_an_instance_writes_a_secret(around, instance, tmp_path):
    answers = [
        around("compile", "--output", "pipeline.yaml"),
        around("upload", "--json"),
        around("submit", "--json"),
    ]
    run_id = answers[-1].json["run_id"]
    instance.store.runs[run_id]["state"] = "RUNNING"
    workflow = instance.store.workflows[run_id]
    workflow.begin("train_model")
    workflow.write("train_model", "a line\n")
    answers += [
        around("schedule", "--every", "6h", "--json"),
        around("status", run_id, "--json"),
        around("runs", "--json"),
        around("cancel", run_id, "--json"),
    ]
    instance.store.runs[run_id]["state"] = "CANCELED"
    answers.append(around("logs", run_id))
    assert len(instance.asked("POST .*(runs|recurringruns|upload)")) >= 3
    texts = written(instance, answers, tmp_path / "here")
    assert any(b"pipelineSpec" in each or b"pipelineInfo" in each for each in texts.values())
    assert list(found_in(texts)) == []


@pytest.mark.parametrize("status", [401, 403, 500])
@pytest.mark.parametrize("words", [("upload",), ("submit",), ("runs", "--json"), ("status", "r")])
def test_a_failing_answer_that_echoes_the_headers_shows_no_secret(
    around, instance, tmp_path, words, status
):
    said = f"Authorization: Bearer {SECRETS['token']} Cookie: session={SECRETS['cookie']}"
    instance.faults.add(".", status, body=json.dumps({"message": said}).encode(), headers=JSON)
    answer = around(*words)
    assert answer.code != 0
    assert answer.err
    assert list(found_in(written(instance, [answer], tmp_path / "here"))) == []


def test_user_information_in_the_endpoint_is_in_no_error(around, instance, tmp_path, monkeypatch):
    given = instance.url.replace("://", f"://user:{SECRETS['google']}@")
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", given)
    answer = around("runs")
    assert answer.code != 0
    assert list(found_in(written(instance, [answer], tmp_path / "here"))) == []


def test_a_secret_in_a_query_is_found(around, instance, tmp_path):
    del around
    # `urlopen` would keep the planted proxy for all later tests.
    opener = build_opener(ProxyHandler({}))
    with suppress(HTTPError):
        opener.open(f"{instance.url}/apis/v2beta1/runs?filter={quote(SECRETS['key'], safe='')}")
    assert [name for name, _ in found_in(written(instance, [], tmp_path / "here"))] == ["key"]


def test_an_experiment_that_another_client_creates_meanwhile(instance, remote, uploaded):
    del uploaded
    experiment = instance.store.create_experiment({"display_name": "flotilla"})
    instance.faults.add("GET .*/experiments", 200, body=b"{}", headers=JSON, times=1)
    assert remote("submit").code == 0
    [run] = instance.store.runs.values()
    assert run["experiment_id"] == experiment["experiment_id"]
    assert len(instance.asked("POST .*/experiments")) == 1


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (("submit", "create_run", "versions"),
         ("answered 500", "not found", "check the name or id and --endpoint")),
        (("upload", "upload_version", "pipelines"),
         ("answered 400", "Failed to create a pipeline version")),
    ],
)  # fmt: skip
def test_what_another_client_deletes_meanwhile(request, remote, monkeypatch, case, words):
    command, method, things = case
    if command == "submit":
        request.getfixturevalue("uploaded")
    real = getattr(Store, method)

    def called(store, *arguments):
        getattr(store, things).clear()
        return real(store, *arguments)

    monkeypatch.setattr(Store, method, called)
    in_one_line(remote(command), *words)


@pytest.mark.parametrize("account", [(), ("--service-account", "trainer")], ids=["", "account"])
def test_a_schedule_of_the_newest_version_is_recognised(instance, remote, uploaded, account):
    del uploaded
    words = ("schedule", "--every", "6h", "--latest", *account)
    assert remote(*words).code == 0
    assert "already exists" in remote(*words).err
    assert len(instance.asked("POST .*recurringruns")) == 1


def test_a_link_leads_to_the_interface_where_the_endpoint_serves_it(instance, remote):
    instance.has_ui = True
    made = remote("upload", "--json")
    page = made.json["artifacts"]["pipeline"]
    assert page.startswith(f"{instance.url}/#/pipelines/details/")
    assert page in made.err
    run = remote("submit", "--json").json
    assert run["artifacts"]["run"] == f"{instance.url}/#/runs/details/{run['run_id']}"


@pytest.mark.parametrize("how", ["option", "variable"])
def test_a_link_leads_to_the_interface_that_is_named(instance, remote, monkeypatch, how):
    named = "https://kfp.example.com/pipeline/#/runs"
    words = ("--ui", named) if how == "option" else ()
    if how == "variable":
        monkeypatch.setenv("FLOTILLA_KFP_UI", named)
    assert remote("upload", *words).code == 0
    run = remote("submit", *words, "--json").json
    at = "https://kfp.example.com/pipeline/#/runs/details"
    assert run["artifacts"]["run"] == f"{at}/{run['run_id']}"
    status = remote("status", run["run_id"], *words, "--json")
    assert status.json["artifacts"]["run"] == run["artifacts"]["run"]
    if how == "option":
        assert not instance.asked("GET /$")


@pytest.mark.parametrize("answer", [404, 503, 0, b"<html>Sign in</html>"], ids=str)
def test_without_an_interface_there_is_no_link_but_a_command(instance, remote, uploaded, answer):
    del uploaded
    status, body = (200, answer) if isinstance(answer, bytes) else (answer, b"")
    instance.faults.add("GET /$", status, body=body)
    made = remote("submit", "--json")
    run_id = made.json["run_id"]
    assert (made.code, made.json["artifacts"]) == (0, {})
    said = f"no link: {instance.url} serves only the API; set the URL of the user interface"
    assert said in made.err
    assert f"flotilla status {run_id} --endpoint {instance.url}" in made.err
    assert "/#/" not in made.err


@pytest.mark.parametrize("url", ["https://me:secret@host", "ftp://host", "https://a b"])
def test_an_address_of_the_interface_that_is_none(remote, url):
    answer = remote("runs", "--ui", url)
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "--ui" in answer.err
    assert "secret" not in answer.err
