"""`python -m flotilla.trainer task` runs one task of a training cluster in this process.

Pipeline steps call the stages as functions, whereas launchers and containers start this program.
This program reports an error as one line on standard error and in the termination message. The exit
codes are defined in `flotilla.trainer.runtime.errors`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from flotilla.trainer import code as bundle
from flotilla.trainer import events
from flotilla.trainer.checkpoints import index
from flotilla.trainer.cluster import process, termination
from flotilla.trainer.config.load import load_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime import signals, streams, tensorflow_import, threads, user_code
from flotilla.trainer.runtime.environment import check_variables
from flotilla.trainer.runtime.errors import (
    DONE,
    FAILED,
    TRY_AGAIN,
    USAGE,
    ConfigError,
    TransientError,
    UserError,
)
from flotilla.trainer.training import task


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run the task, and return its exit code."""
    options = _parser().parse_args(arguments)
    signals.end_with_parent()
    signals.end_at_hang_up()
    threads.limit_threads()
    tensorflow_import.prepare()
    streams.log_to_stderr()
    try:
        check_variables()
        options.stage(options)
    except UserError as error:
        _report(options.workdir, str(error), user_code.find_traceback(error))
        return TRY_AGAIN if isinstance(error, TransientError) else error.exit_code
    except SystemExit as end:
        # Only user code calls `sys.exit` here. A retry would do so again, so fail permanently.
        place = user_code.find_place(end)
        where = f" ({place})" if place else ""
        message = f"your code called sys.exit({end.code!r}){where}"
        _report(options.workdir, message, user_code.find_traceback(end))
        return FAILED
    except (Exception, KeyboardInterrupt) as error:
        if trace := user_code.find_traceback(error):
            line = user_code.format_error(error)
            _report(options.workdir, f"your code raised {line}", trace)
            return FAILED
        termination.write(options.workdir, user_code.format_error(error))
        logging.exception("unexpected error, caused by a bug in Flotilla or in your code")
        return FAILED
    return DONE


def _report(workdir: Path, message: str, trace: str = "") -> None:
    """Report the message on standard error and in the termination log, and log the traceback."""
    termination.write(workdir, message)
    if trace:
        logging.error("%s", trace)
        events.emit(events.UserCodeFailed(error=message, traceback=trace))
    streams.say(f"flotilla: {message}")


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports wrong usage in one line, without the help text."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}; see --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m flotilla.trainer", description=__doc__.splitlines()[0] if __doc__ else None
    )
    stages = parser.add_subparsers(required=True, metavar="STAGE")
    own = stages.add_parser(
        "task", help="run one task of the training cluster that TF_CONFIG describes"
    )
    task.add_arguments(own)
    own.set_defaults(stage=_task)
    fit = stages.add_parser(
        "fit", help="check whether the model fits the dataset, without downloading it"
    )
    fit.add_argument("--dataset", default="", metavar="URI", help="a prepared dataset")
    fit.add_argument(
        "--elsewhere",
        action="store_true",
        help="the run is on other machines, which may have other files and packages",
    )
    fit.set_defaults(stage=_fit)
    # `flotilla predict` starts this stage.
    rows = stages.add_parser("predict")
    rows.add_argument("--request", required=True, type=_path, metavar="FILE")
    rows.set_defaults(stage=_predict)
    for stage in (own, fit):
        stage.add_argument("--config", required=True, type=_path, metavar="FILE")
    for stage in (own, fit, rows):
        stage.add_argument("--workdir", required=True, type=_path, metavar="DIR")
    return parser


def _task(options: argparse.Namespace) -> None:
    with streams.stamp_output():
        task.run(options)


def _predict(options: argparse.Namespace) -> None:
    from flotilla.trainer.prediction import predict

    predict.answer(options.request, options.workdir)


def _fit(options: argparse.Namespace) -> None:
    config = load_config(options.config)
    bundle.enter(config.code)
    try:
        found = _try_model(config, options.dataset, options.workdir)
        if config.cluster.launcher == "local" and not options.elsewhere:
            process.require_memory(config, found.get("parameters", 0))
    except UserError as error:
        if options.elsewhere and user_code.is_of_machine(error):
            raise UserError(str(error)) from error
        raise
    # Report an error in the user's code as a mistake in the configuration that names the code.
    except (Exception, SystemExit) as error:
        if not user_code.find_place(error):
            raise
        line = user_code.format_error(error)
        raise ConfigError(f"your code raised {line}") from error
    sys.stdout.write(f"{json.dumps(found)}\n")


def _try_model(config: Config, dataset: str, scratch: Path) -> dict[str, Any]:
    """Try the model on a dataset or on the first rows of the source. Return fields and notes."""
    # Import TensorFlow only here, within the time limit of the dry run.
    import tensorflow as tf

    from flotilla.trainer.preflight.sample import publish_sample
    from flotilla.trainer.training import dry_run

    # Do not optimize graphs: each runs only once here, so optimization would cost more time.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    if dataset:
        return asdict(dry_run.fit(config, scratch, dataset))
    index.require_weights(config.training.warm_start)
    sample = publish_sample(config.data, scratch)
    found: dict[str, Any] = {"notes": sample.notes}
    if sample.uri or sample.by_builder:
        whole = sample.is_whole or sample.by_builder
        fit = dry_run.fit(config, scratch, sample.uri, whole=whole)
        found |= {**asdict(fit), "notes": (*sample.notes, *fit.notes)}
    return found


def _path(text: str) -> Path:
    # Make the path absolute now, because a task changes its working directory later.
    return Path(text).absolute()


def _leave() -> None:
    """Exit without waiting for the threads of TensorFlow's coordinator and servers."""
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
