"""Storage locations, one per URI scheme, with direct access that bypasses the storage API."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import pytest

from flotilla.trainer import storage
from flotilla.trainer.storage.uri import locate
from tests.stores.faults import Plan
from tests.stores.fixtures import bucket_name
from tests.stores.gcs_server import GcsServer
from tests.stores.s3_server import S3Server

AWKWARD = "the röot #1 100%25 ?x"


class Place(Protocol):
    """Reads and changes stored files without the checks of the storage API."""

    root: str

    def get(self, uri: str) -> bytes:
        """Return the content of a file."""

    def put(self, uri: str, data: bytes) -> None:
        """Create or replace a file."""

    def remove(self, uri: str) -> None:
        """Remove a file."""

    def content(self, uri: str) -> dict[str, bytes]:
        """Return all files below a URI by relative path, including hidden ones."""


def path_of(uri: str) -> Path:
    path = storage.local_path(uri)
    assert path is not None
    return path


def content(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below a folder, including hidden ones."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


class FilePlace:
    def __init__(self, folder: Path) -> None:
        self.root = storage.uri_of(folder / AWKWARD)

    def get(self, uri: str) -> bytes:
        return path_of(uri).read_bytes()

    def put(self, uri: str, data: bytes) -> None:
        path_of(uri).parent.mkdir(parents=True, exist_ok=True)
        path_of(uri).write_bytes(data)

    def remove(self, uri: str) -> None:
        path_of(uri).unlink()

    def content(self, uri: str) -> dict[str, bytes]:
        return content(path_of(uri))


class BucketPlace:
    def __init__(self, server: GcsServer | S3Server, root: str) -> None:
        self.root = storage.join(root, AWKWARD)
        self.server = server
        self._bucket = locate(root).bucket
        server.create_bucket(self._bucket)

    @property
    def plan(self) -> Plan:
        return self.server.plan

    def get(self, uri: str) -> bytes:
        return self.server.content(self._bucket, locate(uri).key)

    def put(self, uri: str, data: bytes) -> None:
        self.server.replace(self._bucket, locate(uri).key, data)

    def remove(self, uri: str) -> None:
        self.server.remove(self._bucket, locate(uri).key)

    def content(self, uri: str) -> dict[str, bytes]:
        prefix = locate(uri).key + "/"
        keys = [key for key in self.server.keys(self._bucket) if key.startswith(prefix)]
        return {key.removeprefix(prefix): self.server.content(self._bucket, key) for key in keys}


def fill(place: Place, uri: str, files: Mapping[str, bytes]) -> None:
    """Write files below a URI, as a killed writer would leave them."""
    for path, data in files.items():
        place.put(storage.join(uri, path), data)


def fetched(uri: str, folder: Path) -> dict[str, bytes]:
    """Return the files that a reader fetches from a published directory."""
    target = folder / "fetched"
    storage.fetch(uri, target)
    found = content(target)
    shutil.rmtree(target)
    return found


def place_of(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Return a location with the URI scheme that is the parameter of a fixture."""
    scheme = request.param
    if scheme == "file":
        return FilePlace(tmp_path)
    server = request.getfixturevalue("gcs" if scheme == "gs" else "s3")
    if scheme == "minio":
        address = server.url.removeprefix("http://")
        options = f"?endpoint={address}&disableSSL=true&region=here"
        return BucketPlace(server, f"minio://{bucket_name()}/k{options}")
    return BucketPlace(server, f"{scheme}://{bucket_name()}/k")
