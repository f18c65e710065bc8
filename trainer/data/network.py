"""Say within seconds that a download cannot work, where TFDS alone would try for minutes."""

from __future__ import annotations

import queue
import socket
import threading
from urllib.parse import urlsplit

import requests

SECONDS = 8.0
# TFDS takes these as a reason to try again, ten times.
UNAVAILABLE = (500, 502, 503, 504)
_FTP_PORT = 21
_GCS = "https://storage.googleapis.com"


class UnreachableError(ConnectionError):
    """The host does not answer; the message is the reason alone."""


def reach(url: str, *, seconds: float = SECONDS) -> None:
    """Return as soon as the host of `url` answers; what it answers is for the download to judge.

    Proxies and certificates are those of `requests`, which TFDS downloads with. Local files are
    taken as reached.

    Raises:
        UnreachableError: it refused, or said nothing for `seconds`.
    """
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    # Names are looked up without any limit of time, hence a thread that nothing waits for.
    threading.Thread(
        target=lambda: answers.put(_failure(url, seconds)), name="reach", daemon=True
    ).start()
    try:
        failure = answers.get(timeout=seconds)
    except queue.Empty:
        failure = f"no answer within {seconds:g} s"
    if failure:
        raise UnreachableError(failure)


def _failure(url: str, seconds: float) -> str:
    try:
        parts = urlsplit(url)
        if parts.scheme in {"http", "https", "gs"}:
            asked = _GCS if parts.scheme == "gs" else url
            status = requests.head(asked, timeout=seconds, allow_redirects=False).status_code
            return f"it answers {status}" if status in UNAVAILABLE else ""
        if parts.scheme == "ftp":
            address = (parts.hostname or "", parts.port or _FTP_PORT)
            socket.create_connection(address, timeout=seconds).close()
    # Whatever it is: what a thread raises is lost, and would look like silence.
    except Exception as error:
        return _reason(error)
    return ""


def _reason(error: Exception) -> str:
    # requests wraps urllib3's error, which wraps the system's: the innermost says it best.
    inner = error.args[0] if error.args else error
    text = str(getattr(inner, "reason", inner) if isinstance(inner, Exception) else error)
    return " ".join(text.rpartition(": ")[2].split()) or type(error).__name__
