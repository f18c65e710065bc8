import subprocess
import sys
from pathlib import Path

import pytest

from flotilla.trainer import storage
from tests.stores.fixtures import bucket_name
from tests.trainer.storage.places import BucketPlace, place_of

WARNINGS = ("-W", "error", "-W", "ignore:Please install grpcio-status:ImportWarning")
REPOSITORY = Path(__file__).parents[3]
FILES = {"b.txt": b"second", "a.bin": bytes(range(256)) * 40, "deep/er/c d.txt": b"", "ü/é": b"x"}

# `s3` also covers `minio`, which uses the same client.
EVERY = pytest.mark.parametrize("place", ["file", "gs", "s3"], indirect=True)


@pytest.fixture
def root(tmp_path):
    """Return a URI whose path contains many special characters."""
    return storage.uri_of(tmp_path / "the röot #1 100%25 ?x")


@pytest.fixture(params=["file", "s3"])
def place(request, tmp_path):
    """Return a location in a file system and one in S3. `EVERY` adds Google Cloud Storage."""
    return place_of(request, tmp_path)


@pytest.fixture(params=["gs", "s3"])
def bucket(request):
    server = request.getfixturevalue("gcs" if request.param == "gs" else "s3")
    return BucketPlace(server, f"{request.param}://{bucket_name()}")


@pytest.fixture
def make(tmp_path):
    """Return a function that writes files into a folder and returns the folder."""

    def _make(name="source", files=FILES):
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        return folder

    return _make


def left_over(folder):
    return [path for path in folder.rglob("*") if path.name.endswith(".part")]


def start(program, *arguments):
    """Start a Python program that can import Flotilla."""
    return subprocess.Popen(
        [sys.executable, *WARNINGS, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )


@pytest.fixture
def uri(place):
    return storage.join(place.root, "a b")
