"""A host that does not answer is known within the deadline."""

import http.server
import socket
import threading
from functools import partial

import pytest
import requests

from trainer.data.builders import download
from trainer.data.builders.download import UnreachableError, reach


class Answer(http.server.BaseHTTPRequestHandler):
    """Answers each HEAD with one status, and notes what was asked."""

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
    """Start a server on loopback that answers with a status; gives its URL and what was asked."""
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


@pytest.mark.parametrize("status", [200, 302, 403, 404, 405, 429])
def test_any_answer_will_do(answering, status):
    url, asked = answering(status)
    reach(url)
    assert asked == ["/some/file.zip"]


@pytest.mark.parametrize("status", download.UNAVAILABLE)
def test_a_host_that_is_out_of_service(answering, status):
    url, _ = answering(status)
    with pytest.raises(UnreachableError, match=f"^it answers {status}$"):
        reach(url)


@pytest.mark.parametrize("scheme", ["http", "https", "ftp"])
def test_a_refused_connection(closed_port, scheme):
    with pytest.raises(UnreachableError, match=r"^\[Errno \d+\] Connection refused$"):
        reach(f"{scheme}://127.0.0.1:{closed_port}/file")


def test_ftp_is_reached_by_its_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reach(f"ftp://127.0.0.1:{listener.getsockname()[1]}/file")


def test_a_host_that_is_not_known(outside_attempts):
    with pytest.raises(UnreachableError):
        reach("http://no-such-host.invalid/file")
    assert outside_attempts == ["no-such-host.invalid"]
    outside_attempts.clear()


def test_buckets_are_reached_at_their_host(outside_attempts):
    with pytest.raises(UnreachableError):
        reach("gs://bucket/file")
    assert outside_attempts == ["storage.googleapis.com"]
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
    try:
        with pytest.raises(UnreachableError, match=r"^no answer within 0\.05 s$"):
            reach("http://example.invalid/file", seconds=0.05)
        (waiting,) = [
            each for each in threading.enumerate() if each.name == "reach" and each not in before
        ]
        # Or the process would wait for it at its end.
        assert waiting.daemon
        assert asked.wait(60)
    finally:
        done.set()
        waiting.join()


def test_the_deadline_is_below_ten_seconds():
    assert download.SECONDS <= 8
    assert reach.__kwdefaults__ == {"seconds": download.SECONDS}


def test_the_request_has_the_deadline_and_follows_nothing(monkeypatch):
    seen = {}

    def head(url, **options):
        seen.update(options, url=url)
        return requests.Response()

    monkeypatch.setattr(requests, "head", head)
    monkeypatch.setattr(requests.Response, "status_code", 200, raising=False)
    reach("https://example.invalid/file", seconds=3)
    assert seen == {"url": "https://example.invalid/file", "timeout": 3, "allow_redirects": False}


def test_a_proxy_is_asked(answering, monkeypatch):
    proxy, asked = answering(200)
    monkeypatch.setenv("http_proxy", proxy.removesuffix("/some/file.zip"))
    reach("http://example.invalid/behind")
    assert asked == ["http://example.invalid/behind"]


def test_a_proxy_that_is_down(closed_port, monkeypatch):
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{closed_port}")
    with pytest.raises(UnreachableError):
        reach("https://example.invalid/file")


def test_a_host_whose_certificate_is_not_trusted_is_out_of_reach(answering):
    # It does not even speak TLS.
    url, _ = answering(200)
    with pytest.raises(UnreachableError) as caught:
        reach(url.replace("http:", "https:"))
    assert "\n" not in str(caught.value)
