"""Storage locations, one per URI scheme, with direct access that bypasses the storage API."""

import shutil
from contextlib import contextmanager

from flotilla.trainer import storage
from flotilla.trainer.storage.uri import locate
from tests.stores.fixtures import bucket_name

AWKWARD = "the röot #1 100%25 ?x"


def path_of(uri):
    path = storage.local_path(uri)
    assert path is not None
    return path


def content(folder):
    """Return the contents of all files below a folder, including hidden ones."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


class FilePlace:
    def __init__(self, folder):
        self.root = storage.uri_of(folder / AWKWARD)

    def get(self, uri):
        return path_of(uri).read_bytes()

    def put(self, uri, data):
        path_of(uri).parent.mkdir(parents=True, exist_ok=True)
        path_of(uri).write_bytes(data)

    def remove(self, uri):
        path_of(uri).unlink()

    def content(self, uri):
        return content(path_of(uri))


class BucketPlace:
    def __init__(self, server, root):
        self.root = storage.join(root, AWKWARD)
        self.server = server
        self._bucket = locate(root).bucket
        server.create_bucket(self._bucket)

    @property
    def plan(self):
        return self.server.plan

    @contextmanager
    def before_requests(self, act):
        """Call a function before each request is answered that arrives in the block."""
        self.plan.before = act
        try:
            yield
        finally:
            self.plan.before = None

    def get(self, uri):
        return self.server.content(self._bucket, locate(uri).key)

    def put(self, uri, data):
        self.server.replace(self._bucket, locate(uri).key, data)

    def remove(self, uri):
        self.server.remove(self._bucket, locate(uri).key)

    def content(self, uri):
        prefix = locate(uri).key + "/"
        keys = [key for key in self.server.keys(self._bucket) if key.startswith(prefix)]
        return {key.removeprefix(prefix): self.server.content(self._bucket, key) for key in keys}


def fill(place, uri, files):
    """Write files below a URI, as a killed writer would leave them."""
    for path, data in files.items():
        place.put(storage.join(uri, path), data)


def fetched(uri, folder):
    """Return the files that a reader fetches from a published directory."""
    target = folder / "fetched"
    storage.fetch(uri, target)
    found = content(target)
    shutil.rmtree(target)
    return found


def place_of(request, tmp_path):
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
