"""The parameter server's side of checkpoints by parts: it publishes and fetches its own files.

The graphs of a chief run in the process and the working directory of a server, but the chief's
Python code does not. A request that needs a client of the store is therefore a file: an operation
on the server writes `parts/requests/TOKEN.json`, and another one reads the reply at
`parts/replies/TOKEN.json`. This needs no port and no address. `parts/ready.json` shows that the
server answers requests.

On a full disk, a reply may not fit. In that case, the server writes a shorter one that asks the
chief to try again. If that does not fit either, the server moves the request to the path of the
reply, which needs no space. Results of actions that cannot be repeated are kept until the chief
asks again. If nothing can be written, there is no reply. To detect this, a waiting chief writes
`parts/probe`.

This module does not import TensorFlow. `flotilla.trainer.checkpoints.part_saver` is the chief's
side.
"""

from __future__ import annotations

import base64
import glob
import json
import logging
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.json_records import parse, parse_record, tree_of
from flotilla.trainer.storage.errors import PASSING, report_errors

FOLDER = "parts"
READY = f"{FOLDER}/ready.json"
REQUESTS = f"{FOLDER}/requests"
REPLIES = f"{FOLDER}/replies"
PROBE = f"{FOLDER}/probe"
SUFFIX = ".json"
POLL_SECONDS = 0.05
# Number of replies to keep. It is small, because a chief reads each reply soon after it is written.
KEPT_REPLIES = 16
# The error that a server reports if it could not write the actual reply.
UNWRITTEN = "cannot write its reply"
# The suffixes of a part's files, as TensorFlow writes them.
DATA, INDEX = ".data-00000-of-00001", ".index"
# Files that are kept when the chief restarts.
_OWN = {Path(each).name for each in (READY, REQUESTS, REPLIES)}
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to a server.

    Attributes:
        action: "begin", "publish", "fetch" or "discard". See `_ACTIONS`.
        uri: the draft that receives a part, or the checkpoint to fetch.
        prefix: the prefix of the files that the server has written, or the folder to fetch into.
        files: the paths to fetch from the checkpoint.
    """

    action: str
    uri: str = ""
    prefix: str = ""
    name: str = ""
    files: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the content of the request file."""
        return json.dumps(tree_of(self))


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A server's reply.

    Attributes:
        path: the path of the file in the checkpoint. For the next three fields see `FileEntry`.
        index: the index of the part, in base64.
        transient: whether the request may succeed later.
    """

    path: str = ""
    size: int = 0
    crc32c: str = ""
    at: str = ""
    index: str = ""
    error: str = ""
    transient: bool = False

    @property
    def entry(self) -> storage.FileEntry:
        """The manifest entry of the file."""
        return storage.FileEntry(self.path, self.size, self.crc32c, self.at)

    @classmethod
    def from_json(cls, data: bytes) -> Reply:
        """Parse a reply. Raises `ValueError` if it is invalid."""
        found = parse_record(cls, parse(data))
        if found is None:
            raise ValueError(f"{data!r} is not a server's reply")
        return found


class PartServer:
    """Two threads that answer requests in a server's folder: one for "discard", one for others."""

    def __init__(self, folder: Path, task: str) -> None:
        """Store the arguments. `start` starts the threads."""
        self._folder = folder.absolute()
        self._task = task
        self._replied: deque[Path] = deque()
        # Unwritten replies to requests that cannot be repeated.
        self._unwritten: dict[Request, Reply] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def start(self) -> bool:
        """Clear the folder, start the threads, and return whether the folder is writable."""
        shutil.rmtree(self._folder / FOLDER, ignore_errors=True)
        ready = json.dumps({"task": self._task, "folder": str(self._folder)})
        try:
            for name in (REQUESTS, REPLIES):
                (self._folder / name).mkdir(parents=True, exist_ok=True)
            (self._folder / READY).write_text(ready, encoding="utf-8")
        except OSError as error:
            log.warning(
                "%s cannot write to %s: %s; free some space there, or make it writable. The "
                "chief writes the variables of this server until the server restarts",
                self._task,
                self._folder / FOLDER,
                error.strerror,
            )
            return False
        for is_quick in (True, False):
            threading.Thread(
                target=self._serve, args=(is_quick,), name="parts", daemon=True
            ).start()
        return True

    def stop(self) -> None:
        """Stop answering requests."""
        self._ended.set()

    def _serve(self, is_quick: bool) -> None:
        last = ""
        while not self._ended.is_set():
            try:
                if self.answer_next(is_quick):
                    last = ""
                    continue
            except OSError as error:
                if str(error) != last:
                    log.warning("cannot answer requests for checkpoint parts: %s", error)
                last = str(error)
            self._ended.wait(POLL_SECONDS)

    def answer_next(self, is_quick: bool | None = None) -> bool:
        """Answer one complete request, and return whether there was one.

        If `is_quick` is true, only consider quick actions. If it is false, only consider slow ones.
        """
        for path in sorted((self._folder / REQUESTS).iterdir()):
            try:
                request = parse_record(Request, parse(path.read_bytes()))
            except (ValueError, FileNotFoundError):
                request = None
            if request is None:
                # The request is incomplete, or the other thread has answered it.
                continue
            if is_quick not in {None, request.action in _QUICK}:
                continue
            target = self._folder / REPLIES / path.name
            # The chief sends a request again if its file system wrongly reported an error.
            with self._lock:
                is_answered = target in self._replied
            if not is_answered:
                reply = self._unwritten.get(request) or self._answer(request)
                self._reply(path, target, request, reply)
                self._note(target)
            path.unlink(missing_ok=True)
            return True
        return False

    def _note(self, target: Path) -> None:
        with self._lock:
            self._replied.append(target)
            old = self._replied.popleft() if len(self._replied) > KEPT_REPLIES else None
        if old:
            old.unlink(missing_ok=True)

    def _reply(self, path: Path, target: Path, request: Request, reply: Reply) -> None:
        try:
            _write(target, reply)
            self._unwritten.pop(request, None)
        except OSError as error:
            self._remember(request, reply)
            reason = f"{self._task}: {UNWRITTEN}: {error.strerror}; free some disk space"
            log.warning("%s", reason)
            try:
                _write(target, Reply(error=reason, transient=True))
            except OSError:
                os.replace(path, target)

    def _remember(self, request: Request, reply: Reply) -> None:
        if request.action != "publish" or reply.error:
            return
        self._unwritten[request] = reply
        if len(self._unwritten) > KEPT_REPLIES:
            del self._unwritten[next(iter(self._unwritten))]

    def _answer(self, request: Request) -> Reply:
        try:
            with report_errors(
                f"{request.action} a part of a checkpoint in {self._folder / FOLDER}"
            ):
                return _ACTIONS[request.action](self._folder, request)
        except UserError as error:
            cause = error.__cause__
            may_pass = isinstance(cause, OSError) and cause.errno in PASSING
            transient = may_pass or isinstance(error, storage.Unavailable)
            return Reply(error=f"{self._task}: {error}", transient=transient)
        # A store's client may raise any exception, and the chief needs a reply.
        except Exception as error:
            log.exception("a request for a checkpoint part failed")
            return Reply(error=f"{self._task}: {type(error).__name__}: {error}")


def _write(target: Path, reply: Reply) -> None:
    part = target.with_suffix(".part")
    try:
        part.write_text(json.dumps(tree_of(reply)), encoding="utf-8")
        os.replace(part, target)
    except OSError:
        # A partial file would take the space that a shorter reply needs.
        part.unlink(missing_ok=True)
        raise


def _begin(folder: Path, _request: Request) -> Reply:
    """Remove the files that an earlier chief left."""
    for path in (folder / FOLDER).iterdir():
        if path.name in _OWN:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return Reply()


def _publish(folder: Path, request: Request) -> Reply:
    """Add the data of a part to the draft of a checkpoint, and return the part's index."""
    prefix = folder / request.prefix
    index = Path(f"{prefix}{INDEX}")
    # Read the index first, because moving the data cannot be repeated.
    data = index.read_bytes()
    entry = storage.add_file(request.uri, Path(f"{prefix}{DATA}"), request.name)
    # Ignore an error, because the server also removes the file when the next chief starts.
    with suppress(OSError):
        index.unlink()
    return Reply(
        path=entry.path,
        size=entry.bytes,
        crc32c=entry.crc32c,
        at=entry.at,
        index=base64.b64encode(data).decode(),
    )


def _fetch(folder: Path, request: Request) -> Reply:
    into = folder / request.prefix
    storage.fetch(request.uri, into, only=lambda path: path in request.files)
    return Reply()


def _discard(folder: Path, request: Request) -> Reply:
    """Remove fetched files, or a part that will not be published."""
    first, *below = Path(request.prefix).parts or ("",)
    if first != FOLDER or not below or ".." in below or below[0] in _OWN:
        raise UserError(f"{request.prefix!r} is not part of a checkpoint, so it is not removed")
    at = folder / request.prefix
    shutil.rmtree(at, ignore_errors=True)
    # Also remove TensorFlow's unfinished files, which have other suffixes.
    for path in at.parent.glob(f"{glob.escape(at.name)}.*"):
        path.unlink(missing_ok=True)
    return Reply()


_ACTIONS: Mapping[str, Callable[[Path, Request], Reply]] = {
    "begin": _begin,
    "publish": _publish,
    "fetch": _fetch,
    "discard": _discard,
}
_QUICK = {"discard"}
