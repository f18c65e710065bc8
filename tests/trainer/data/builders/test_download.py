"""Tests downloads and the one-line error of a download that fails."""

import gzip
import http.server
import re
import shutil
import socket
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import requests
import tensorflow_datasets as tfds

from flotilla.trainer.data.builders import download as module
from flotilla.trainer.data.builders.download import UnreachableError, download, reach
from flotilla.trainer.runtime.errors import ConfigError, TransientError, UserError
from tests.trainer.data import made_builders as builders

MNIST = [
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
]
REMOTE = "http://data.example.invalid"


@pytest.fixture
def data_dir(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def unreachable(monkeypatch):
    """Make every host unreachable; return the URLs that are requested."""
    asked = []

    def refuse(url):
        asked.append(url)
        raise UnreachableError("no route")

    monkeypatch.setattr(module, "reach", refuse)
    return asked


def refusal(kind, *args):
    with pytest.raises(kind) as caught:
        download(*args)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("data.")
    return message


def test_a_builder_that_needs_no_files(data_dir, unreachable, capsys):
    builder = builders.Small(data_dir=data_dir)
    download("small", builder, "")
    assert builder.info.splits["train"].num_examples == 40
    assert not unreachable
    assert capsys.readouterr().out == ""


# TFDS reads a dataset's description with a method that protobuf has deprecated.
@pytest.mark.filterwarnings(r"ignore:label\(\) is deprecated:DeprecationWarning")
def test_what_is_prepared_is_left_alone(data_dir, monkeypatch):
    download("small", builders.Small(data_dir=data_dir), "")
    monkeypatch.setattr(builders.Small, "example", lambda *_: pytest.fail("made again"))
    download("small", builders.Small(data_dir=data_dir), "/no/such/folder")


def test_a_real_dataset_without_files_and_without_network(data_dir, outside_attempts):
    message = refusal(
        UserError, "fashion_mnist", tfds.builder("fashion_mnist", data_dir=data_dir), ""
    )
    assert "fashion_mnist cannot be downloaded" in message
    assert "cannot be reached (" in message
    assert "set data.manual_dir to it: " in message
    assert not [name for name in MNIST if name not in message]
    # One request is sent to the first host, without a retry.
    assert len(outside_attempts) == 1
    outside_attempts.clear()


def test_the_probe_comes_before_the_download(data_dir, unreachable, monkeypatch):
    monkeypatch.setattr(builders.Downloading, "urls", [f"{REMOTE}/a", f"{REMOTE}/b"])
    message = refusal(TransientError, "own", builders.Downloading(data_dir=data_dir), "")
    assert "data.example.invalid cannot be reached (no route)" in message
    assert unreachable == [f"{REMOTE}/a"]
    # Without checksums, the files cannot be named.
    assert "manual_dir" not in message
    assert "TFDS_DATA_DIR" in message


def test_a_host_is_asked_once(data_dir, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "reach", asked.append)
    urls = []
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
        urls.append(str(tmp_path / name))
    monkeypatch.setattr(builders.Downloading, "urls", urls)
    download("own", builders.Downloading(data_dir=data_dir), "")
    assert asked == urls[:1]


def test_no_network_is_asked_for_files_that_are_there(
    data_dir, mnist_dir, unreachable, monkeypatch
):
    # Skip the generation of examples, which is slow and not tested here.
    builder = tfds.builder("mnist", data_dir=data_dir)
    monkeypatch.setattr(type(builder), "_generate_examples", lambda *_, **__: iter(TWO_DIGITS))
    download("mnist", builder, str(mnist_dir))
    assert not unreachable
    assert builder.info.splits["test"].num_examples == 2


TWO_DIGITS = [
    (label, {"image": builders.np.full((28, 28, 1), label, "uint8"), "label": label})
    for label in (0, 1)
]


@pytest.mark.parametrize("there", [0, 3])
def test_files_that_are_missing_are_named(data_dir, mnist_dir, tmp_path, unreachable, there):
    manual = tmp_path / "manual"
    manual.mkdir()
    for name in MNIST[:there]:
        shutil.copy(mnist_dir / name, manual)
    message = refusal(UserError, "mnist", tfds.builder("mnist", data_dir=data_dir), str(manual))
    named = message.partition(f"data.manual_dir ({manual}): ")[2].split(", ")
    assert sorted(named) == sorted(MNIST[there:])
    assert len(unreachable) == 1


@pytest.mark.parametrize(("make", "name"), [(id, "~/manual"), (Path.touch, "{}/manual")])
def test_a_manual_folder_that_is_none(data_dir, tmp_path, monkeypatch, make, name):
    monkeypatch.setenv("HOME", str(tmp_path))
    make(tmp_path / "manual")
    message = refusal(
        ConfigError, "mnist", builders.Small(data_dir=data_dir), name.format(tmp_path)
    )
    assert message.startswith(f"data.manual_dir: {tmp_path / 'manual'} is not a folder")


def test_a_file_that_is_not_the_official_one(data_dir, tmp_path, unreachable):
    manual = tmp_path / "manual"
    manual.mkdir()
    for name in MNIST:
        (manual / name).write_bytes(gzip.compress(b"something else"))
    message = refusal(UserError, "mnist", tfds.builder("mnist", data_dir=data_dir), str(manual))
    named = re.match(r"data.manual_dir: (\S+) is not the official file", message)
    assert named is not None
    assert named[1] in {str(manual / name) for name in MNIST}
    assert "download it again from http" in message
    assert not unreachable


@pytest.mark.parametrize("name", ["manual", "data/downloads/manual"])
def test_files_that_only_a_person_can_get(data_dir, tmp_path, name):
    message = refusal(UserError, "by_hand", builders.ByHand(data_dir=data_dir), "")
    assert "set data.manual_dir to the folder that has them" in message
    assert message.endswith("Register at the site, and put all.zip into the folder.")
    manual = tmp_path / name
    manual.mkdir(parents=True)
    (manual / "all.zip").touch()
    builder = builders.ByHand(data_dir=data_dir)
    download("by_hand", builder, str(manual) if name == "manual" else "")
    assert builder.is_prepared()


def test_a_builder_that_fails(data_dir):
    before = sys.stdout
    what = r"own could not be prepared: RuntimeError: .*no example 0"
    with pytest.raises(UserError, match=rf"{what}.* \(.*data/made_builders\.py:\d+\)$") as caught:
        download("own", builders.Failing(data_dir=data_dir), "")
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert sys.stdout is before
    shutil.rmtree(data_dir, ignore_errors=True)
    data_dir.write_text("")
    assert str(data_dir) in refusal(UserError, "own", builders.Small(data_dir=data_dir), "")


@pytest.mark.parametrize(
    ("error", "is_transient"),
    [
        (tfds.download.DownloadError("Failed to get url u. HTTP code: 404."), False),
        (tfds.download.DownloadError("Failed to get url u. HTTP code: 429."), True),
        (requests.ConnectionError("Connection aborted."), True),
        (requests.exceptions.ChunkedEncodingError("Connection broken"), True),
        (requests.exceptions.SSLError("certificate verify failed"), False),
        (requests.exceptions.InvalidURL("no host"), False),
        (TimeoutError("timed out"), True),
        (ValueError("no such column"), False),
        (FileNotFoundError(2, "No such file", "/data/a"), False),
    ],
    ids=str,
)
def test_only_a_failure_of_the_network_may_pass(data_dir, monkeypatch, error, is_transient):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(builders.Small, "_split_generators", fail)
    message = refusal(UserError, "own", builders.Small(data_dir=data_dir), "")
    if isinstance(error, tfds.download.DownloadError):
        assert message == f"data.dataset: own cannot be downloaded: {error}"
    with pytest.raises(UserError) as caught:
        download("own", builders.Small(data_dir=data_dir), "")
    assert isinstance(caught.value, TransientError) == is_transient


class Answer(http.server.BaseHTTPRequestHandler):
    """Replies to every HEAD request with the same status, and records the requests."""

    def __init__(self, status, asked, *args):
        self.status, self.asked = status, asked
        super().__init__(*args)

    def do_HEAD(self):
        self.asked.append(self.path)
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def answering():
    """Return a function that starts a server; it returns the server's URL and its requests."""
    servers = []

    def start(status):
        asked = []
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Answer, status, asked))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}/some/file.zip", asked

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def closed_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.parametrize("status", [200, 302, 403, 404, 405, 429, *module.UNAVAILABLE])
def test_any_answer_will_do_but_that_of_a_host_that_is_out_of_service(answering, status):
    url, asked = answering(status)
    if status in module.UNAVAILABLE:
        with pytest.raises(UnreachableError, match=f"^HTTP status {status}$"):
            reach(url)
    else:
        reach(url)
    assert asked == ["/some/file.zip"]


@pytest.mark.parametrize("scheme", ["http", "https", "ftp"])
def test_a_refused_connection(closed_port, scheme):
    with pytest.raises(UnreachableError, match=r"^\[Errno \d+\] Connection refused$"):
        reach(f"{scheme}://127.0.0.1:{closed_port}/file")
    if scheme == "ftp":
        with socket.create_server(("127.0.0.1", 0)) as listener:
            reach(f"ftp://127.0.0.1:{listener.getsockname()[1]}/file")


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://no-such-host.invalid/file", "no-such-host.invalid"),
        ("gs://bucket/file", "storage.googleapis.com"),
    ],
)
def test_a_host_that_is_not_known(outside_attempts, url, host):
    with pytest.raises(UnreachableError):
        reach(url)
    assert outside_attempts == [host]
    outside_attempts.clear()


@pytest.mark.parametrize("url", ["/some/file", "file:///some/file", "relative"])
def test_files_are_there(url):
    reach(url)


@pytest.mark.parametrize("url", ["http://", "http://[", "ftp://127.0.0.1:99999999/x"])
def test_what_is_no_address(url):
    with pytest.raises(UnreachableError):
        reach(url)


def test_a_silent_host_is_given_up_at_the_deadline(monkeypatch):
    asked, done = threading.Event(), threading.Event()

    def silent(*_, **__):
        asked.set()
        done.wait()
        raise requests.ConnectionError

    monkeypatch.setattr(requests, "head", silent)
    before = threading.enumerate()
    assert reach.__kwdefaults__ == {"seconds": module.SECONDS}
    assert module.SECONDS <= 8
    try:
        with pytest.raises(UnreachableError, match=r"^no answer within 0\.05 s$"):
            reach("http://example.invalid/file", seconds=0.05)
        (waiting,) = [
            each for each in threading.enumerate() if each.name == "reach" and each not in before
        ]
        # Without a daemon thread, the process could not exit before the host answers.
        assert waiting.daemon
        assert asked.wait(60)
    finally:
        done.set()
        waiting.join()


def test_the_request_has_the_deadline_and_follows_nothing(monkeypatch):
    seen = {}

    def head(url, **options):
        seen.update(options, url=url)
        return requests.Response()

    monkeypatch.setattr(requests, "head", head)
    monkeypatch.setattr(requests.Response, "status_code", 200, raising=False)
    reach("https://example.invalid/file", seconds=3)
    assert seen == {"url": "https://example.invalid/file", "timeout": 3, "allow_redirects": False}


def test_a_proxy_is_asked(answering, closed_port, monkeypatch):
    proxy, asked = answering(200)
    monkeypatch.setenv("http_proxy", proxy.removesuffix("/some/file.zip"))
    reach("http://example.invalid/behind")
    assert asked == ["http://example.invalid/behind"]
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{closed_port}")
    with pytest.raises(UnreachableError):
        reach("https://example.invalid/file")


def test_a_host_whose_certificate_is_not_trusted_is_out_of_reach(answering):
    # The server does not support TLS.
    url, _ = answering(200)
    with pytest.raises(UnreachableError) as caught:
        reach(url.replace("http:", "https:"))
    assert "\n" not in str(caught.value)
