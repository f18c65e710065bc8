"""Storage of published directories. A directory is complete or absent, even if its writer dies.

The manifest is written last, as the atomic commit, and lists each file with its size and crc32c.
Directories and files are named by URIs that begin with `file://`, `gs://`, `s3://` or `minio://`.
All schemes have the same contract. An error that the user can fix is raised as a
`flotilla.trainer.runtime.errors.UserError`.
"""

from flotilla.trainer.storage.errors import (
    Conflict,
    Corrupt,
    Missing,
    NotPublished,
    Unavailable,
    UnknownSchema,
    check_form,
)
from flotilla.trainer.storage.manifest import FileEntry, Manifest
from flotilla.trainer.storage.publishing import (
    add_file,
    append_line,
    collect_garbage,
    commit,
    create_bytes,
    delete,
    draft,
    fetch,
    is_published,
    list_published,
    names,
    newest,
    publish,
    read_bytes,
    read_clock,
    read_file,
    read_json,
    read_manifest,
    verify,
    write_bytes,
)
from flotilla.trainer.storage.uri import join, local_path, name_of, parent_of, uri_of

__all__ = [
    "Conflict", "Corrupt", "FileEntry", "Manifest", "Missing", "NotPublished", "Unavailable",
    "UnknownSchema", "add_file", "append_line", "check_form", "collect_garbage", "commit",
    "create_bytes", "delete", "draft", "fetch", "is_published", "join", "list_published",
    "local_path", "name_of", "names", "newest", "parent_of", "publish", "read_bytes", "read_clock",
    "read_file", "read_json", "read_manifest", "uri_of", "verify", "write_bytes",
]  # fmt: skip
