"""Prepares tables with two processes until a test kills it: `killed.py SOURCE ROOT`."""

import sys
from pathlib import Path

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data import prepare as module
from flotilla.trainer.data.files import file_pieces

FEW_BYTES = 10_000


def main(source: str, root: str) -> None:
    """Prepare the tables, and print a line after each part."""
    file_pieces.PART_BYTES = FEW_BYTES
    publish = storage.publish

    def publish_and_say(*args, kind, **fields):
        found = publish(*args, kind=kind, **fields)
        if kind == "part":
            sys.stdout.write("a part is done\n")
            sys.stdout.flush()
        return found

    storage.publish = publish_and_say
    config = DataConfig(
        source=source, format="parquet", label=("label",), runner={"processes": 2}, shards=2
    )
    module.prepare(config, storage.uri_of(root), Path(root) / "scratch")


if __name__ == "__main__":
    main(*sys.argv[1:])
