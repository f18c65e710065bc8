"""`python -m trainer STAGE`: one stage, or one task of a cluster, in this process."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from trainer import parent
from trainer.errors import DONE, FAILED, USAGE, ConfigError, UserError


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, call one stage, and return its exit code."""
    options = _parser().parse_args(arguments)
    parent.end_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        options.stage(options)
    except UserError as error:
        sys.stderr.write(f"flotilla: {error}\n")
        _leave_words(options.workdir, str(error))
        return error.exit_code
    except Exception as error:
        logging.exception("a bug of Flotilla, or of the code that it was given")
        _leave_words(options.workdir, f"{type(error).__name__}: {str(error).strip()}")
        return FAILED
    return DONE


def _leave_words(workdir: Path, words: str) -> None:
    """Tell the launcher why this process ends."""
    # Without room for the words the exit code still has to arrive.
    with suppress(OSError):
        (workdir / "words.txt").write_text(f"{' '.join(words.split())}\n", encoding="utf-8")


def _task(options: argparse.Namespace) -> None:
    from trainer import chiefless, cluster, config_file, launcher, topology

    config = config_file.load(options.config)
    tasks, this = cluster.from_tf_config(os.environ.get("TF_CONFIG", ""))
    job = launcher.Job(
        config=config,
        dataset=options.dataset,
        checkpoints=options.checkpoints,
        workdir=options.workdir,
    )
    if this.role not in tasks.addresses:
        raise ConfigError(f"TF_CONFIG: the role {this.role!r} is not available yet")
    cluster.check_port(tasks, this)
    used = topology.topology_of(config.training.strategy)
    if used.chief and not tasks.count("chief") and this == chiefless.FIRST_WORKER:
        tasks, this = chiefless.with_chief(tasks), chiefless.CHIEF
        chiefless.serve_beside(tasks, config.cluster.max_restarts)
    if used.leads(this):
        from trainer.lead import lead

        lead(job, tasks, this)
    else:
        from trainer.serve import serve

        serve(job, tasks, this)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}; see --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m trainer", description=__doc__)
    stages = parser.add_subparsers(required=True, metavar="STAGE")
    task = stages.add_parser("task", help="one task of a training cluster (TF_CONFIG says which)")
    task.add_argument("--dataset", required=True, metavar="URI")
    task.add_argument("--checkpoints", required=True, metavar="URI")
    task.set_defaults(stage=_task)
    for stage in (task,):
        stage.add_argument("--config", required=True, type=Path, metavar="FILE")
        stage.add_argument("--workdir", required=True, type=Path, metavar="DIR")
    return parser


def _leave() -> None:
    """End without waiting for the threads of TensorFlow's coordinator and servers."""
    status = FAILED
    try:
        status = main()
    except SystemExit as usage:
        status = int(usage.code or DONE)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _leave()
