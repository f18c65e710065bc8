"""`python -m trainer STAGE`: one stage, or one task of a cluster, in this process."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from trainer.cluster import signals, termination
from trainer.errors import DONE, FAILED, USAGE, UserError
from trainer.training import task


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, call one stage, and return its exit code."""
    options = _parser().parse_args(arguments)
    signals.end_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        options.stage(options)
    except UserError as error:
        _tell(options.workdir, str(error))
        return error.exit_code
    except SystemExit as end:
        # Nothing of Flotilla's own ends a stage this way, and to begin again would not help.
        _tell(options.workdir, f"the code that it was given called sys.exit({end.code!r})")
        return FAILED
    except Exception as error:
        termination.leave(options.workdir, f"{type(error).__name__}: {str(error).strip()}")
        logging.exception("a bug of Flotilla, or of the code that it was given")
        return FAILED
    return DONE


def _tell(workdir: Path, words: str) -> None:
    termination.leave(workdir, words)
    # The log may stand on a disk that is full.
    with suppress(OSError):
        sys.stderr.write(f"flotilla: {words}\n")
        sys.stderr.flush()


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}; see --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m trainer", description=__doc__)
    stages = parser.add_subparsers(required=True, metavar="STAGE")
    own = stages.add_parser("task", help="one task of a training cluster (TF_CONFIG says which)")
    task.add_arguments(own)
    own.set_defaults(stage=task.run)
    for stage in (own,):
        stage.add_argument("--config", required=True, type=_path, metavar="FILE")
        stage.add_argument("--workdir", required=True, type=_path, metavar="DIR")
    return parser


def _path(text: str) -> Path:
    # A task changes into its folder.
    return Path(text).absolute()


def _leave() -> None:
    """End without waiting for the threads of TensorFlow's coordinator and servers."""
    status = FAILED
    try:
        status = main()
    except SystemExit as usage:
        status = int(usage.code or DONE)
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _leave()
