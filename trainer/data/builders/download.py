"""Let TFDS download and prepare a dataset, and report a failure in one line.

If a host is unreachable, the download fails within seconds. TFDS alone would retry for minutes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import requests
import tensorflow_datasets as tfds
from tensorflow_datasets.core.utils import tqdm_utils

from flotilla.trainer.events.progress import Work
from flotilla.trainer.runtime.errors import ConfigError, TransientError, UserError
from flotilla.trainer.runtime.user_code import find_place, format_error, short_message

SECONDS = 8.0
# HTTP status codes for which TFDS retries a request, up to ten times.
UNAVAILABLE = (500, 502, 503, 504)
_FTP_PORT = 21
_GCS = "https://storage.googleapis.com"


class UnreachableError(ConnectionError):
    """The host cannot be reached or is overloaded. The message contains only the reason."""


def reach(url: str, *, seconds: float = SECONDS) -> None:
    """Raise `UnreachableError` if the host of `url` cannot be reached. Ignore other errors."""
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    # Use a daemon thread, because DNS lookups have no timeout.
    threading.Thread(
        target=lambda: answers.put(_network_failure(url, seconds)), name="reach", daemon=True
    ).start()
    try:
        failure = answers.get(timeout=seconds)
    except queue.Empty:
        failure = f"no answer within {seconds:g} s"
    if failure:
        raise UnreachableError(failure)


def _network_failure(url: str, seconds: float) -> str:
    try:
        parts = urlsplit(url)
        if parts.scheme in {"http", "https", "gs"}:
            asked = _GCS if parts.scheme == "gs" else url
            status = requests.head(asked, timeout=seconds, allow_redirects=False).status_code
            return f"HTTP status {status}" if status in UNAVAILABLE else ""
        if parts.scheme == "ftp":
            address = (parts.hostname or "", parts.port or _FTP_PORT)
            socket.create_connection(address, timeout=seconds).close()
    # Catch everything, because an exception in a thread is lost and would look like a timeout.
    except Exception as error:
        return _reason(error)
    return ""


def _reason(error: Exception) -> str:
    # requests wraps urllib3's error, which wraps the system's error. Use the innermost message.
    inner = error.args[0] if error.args else error
    text = str(getattr(inner, "reason", inner) if isinstance(inner, Exception) else error)
    return " ".join(text.rpartition(": ")[2].split()) or type(error).__name__


_FILES_NAMED = 8
# Errors that mean that a host is unreachable or the connection broke. `RetryError` means that the
# last of ten retries also got a status in `UNAVAILABLE`.
_BROKEN = (
    ConnectionError,
    TimeoutError,
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
    requests.exceptions.RetryError,
)


def download(
    name: str, builder: tfds.core.DatasetBuilder, manual_dir: str, *, beam_options: Any = None
) -> None:
    """Download and prepare the builder's dataset. Do nothing if it is already prepared.

    Downloads are stored in the builder's `data_dir`. If `manual_dir` is not empty, official files
    in that folder are used instead of downloads. A Beam builder runs with `beam_options`.

    Raises:
        ConfigError: the folder does not exist.
        TransientError: a host is unreachable or overloaded, or the connection broke.
        UserError: files are missing or not the official ones, or the builder failed.
    """
    # Do not call `is_prepared()`, because it logs a warning if the dataset is not prepared.
    if (builder.data_path / "dataset_info.json").exists():
        return
    folder = _folder(manual_dir)
    _refuse_without_manual_files(name, builder, folder)
    _ask_before_download(builder, _reach_or_explain(name, builder, folder))
    tfds.disable_progress_bar()
    settings = tfds.download.DownloadConfig(
        manual_dir=folder, try_download_gcs=False, beam_options=beam_options
    )
    try:
        # TFDS prints to standard output, which is reserved for results.
        with contextlib.redirect_stdout(sys.stderr), _report_bars():
            builder.download_and_prepare(download_config=settings)
    except UserError:
        raise
    except tfds.download.DownloadError as error:
        raise _kind(error)(
            f"data.dataset: {name} cannot be downloaded: {short_message(error)}"
        ) from error
    # Catch everything, because a builder may be the user's own code.
    except Exception as error:
        raise _kind(error)(_failure(name, error)) from error


# The titles of the TFDS progress bars to report, and the activities that they show. The download
# bar counts MiB.
_TITLES = {"Dl Size": "downloading", "Extraction": "extracting", "Shuffling": "shuffling"}
_MIB = 1 << 20


class _Bar:
    """A replacement for a TFDS progress bar. It displays nothing and reports counts to `Work`."""

    def __init__(self, iterable: Any = None, *_: object, **given: Any) -> None:
        title, unit = (str(given.get(name) or "").strip(" .") for name in ("desc", "unit"))
        known = {title: f"generating{title[10:]}"} if title.startswith("Generating ") else _TITLES
        what = next((words for begin, words in known.items() if title.startswith(begin)), "")
        # Do not count the bars of splits and URLs, because they enclose other bars.
        is_counted = what and unit not in ("splits", "url")
        unit = {"MiB": "bytes", "file": "files"}.get(unit, unit)
        self._work = Work(what, unit, given.get("total") or 0) if is_counted else None
        self._size = _MIB if unit == "bytes" else 1
        self._iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        with self:
            for each in self._iterable:
                yield each
                self.update()

    def __enter__(self) -> Self:
        if self._work:
            self._work.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._work:
            self._work.__exit__(*error)

    def update(self, count: int = 1) -> None:
        if self._work:
            self._work.add(self._scale(count))

    def update_total(self, more: int = 1) -> None:
        if self._work:
            self._work.expect(self._scale(more))

    def _scale(self, count: int) -> int:
        # TFDS counts bytes, not MiB, when it copies a file.
        return int(count) * (1 if isinstance(count, tfds.core.utils.Size) else self._size)

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@contextlib.contextmanager
def _report_bars() -> Iterator[None]:
    """Replace the disabled TFDS progress bars with `_Bar` in this block."""
    before = tqdm_utils.EmptyTqdm
    tqdm_utils.EmptyTqdm = _Bar
    try:
        yield
    finally:
        tqdm_utils.EmptyTqdm = before


def _kind(error: Exception) -> type[UserError]:
    status = re.search(r"HTTP code: (\d+)", str(error))
    busy = status is not None and int(status[1]) in (408, 429, *UNAVAILABLE)
    broken = isinstance(error, _BROKEN) and not isinstance(error, requests.exceptions.SSLError)
    return TransientError if busy or broken else UserError


def _folder(manual_dir: str) -> Path | None:
    if not manual_dir:
        return None
    folder = Path(manual_dir).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(
            f"data.manual_dir: {folder} is not a folder; set it to the folder with the files"
        )
    return folder


def _manual_folder(builder: Any, folder: Path | None) -> Path:
    # By default, TFDS looks for manual files in `downloads/manual`.
    return folder or Path(builder.data_dir_root) / "downloads" / "manual"


def _refuse_without_manual_files(name: str, builder: Any, folder: Path | None) -> None:
    instructions = builder.MANUAL_DOWNLOAD_INSTRUCTIONS
    place = _manual_folder(builder, folder)
    if instructions and not (place.is_dir() and any(place.iterdir())):
        raise UserError(
            f"data.dataset: the files of {name} are not in {place}; set data.manual_dir to the "
            f"folder that has them. {' '.join(instructions.split())}"
        )


def _ask_before_download(builder: Any, ask: Callable[[str], None]) -> None:
    """Call `ask(url)` before TFDS downloads each file.

    A builder's URLs are unknown until it downloads them: its list of checksums covers all its
    configs, and may be missing. TFDS has no public hook for this.
    """
    make = builder._make_download_manager

    def make_asking(**options: Any) -> Any:
        manager = make(**options)
        start = manager._download

        def ask_and_start(resource: Any) -> Any:
            ask(resource.url)
            return start(resource)

        manager._download = ask_and_start
        return manager

    builder._make_download_manager = make_asking


def _reach_or_explain(name: str, builder: Any, folder: Path | None) -> Callable[[str], None]:
    reached: set[str] = set()

    def ask(url: str) -> None:
        host = urlsplit(url).netloc
        if host in reached:
            return
        try:
            reach(url)
        except UnreachableError as error:
            raise TransientError(
                f"data.dataset: {name} cannot be downloaded, because {host} cannot be reached "
                f"({error}); {_remedy(url, builder, _manual_folder(builder, folder), bool(folder))}"
            ) from error
        reached.add(host)

    return ask


def _remedy(url: str, builder: Any, place: Path, is_set: bool) -> str:
    known = builder.url_infos or {}
    if url not in known or not known[url].filename:
        return "run with network access, or set TFDS_DATA_DIR to a folder that has the dataset"
    # The file of this URL comes first, because the others may belong to other configs.
    names = dict.fromkeys([known[url].filename, *(info.filename or "" for info in known.values())])
    absent = [file for file in names if file and not (place / file).exists()]
    more = f" and {len(absent) - _FILES_NAMED} more" if len(absent) > _FILES_NAMED else ""
    files = ", ".join(absent[:_FILES_NAMED]) + more
    if is_set:
        return f"put the missing files into data.manual_dir ({place}): {files}"
    return f"put the official files into a folder and set data.manual_dir to it: {files}"


def _failure(name: str, error: Exception) -> str:
    wrong = re.match(r"Artifact (\S+), downloaded to (.+), has wrong checksum", str(error))
    if wrong:
        url, path = wrong.groups()
        return (
            f"data.manual_dir: {path} is not the official file (its size or sha256 differs); "
            f"download it again from {url}"
        )
    if isinstance(error, OSError) and error.filename:
        return f"data.dataset: {name} could not be prepared: {error.filename}: {error.strerror}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if find_place(error) else f" ({os.path.basename(frame.filename)}:{frame.lineno})"
    return f"data.dataset: {name} could not be prepared: {format_error(error)}{where}"
