"""The options of a Beam pipeline, checked before anything is made, and what its workers reach."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

from trainer import storage, user_code
from trainer.config.data import DataConfig, RunnerConfig
from trainer.errors import ConfigError, nearest

# Beam's own name for it may take another runner, which it downloads.
_DIRECT = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"
_HERE = {"FnApiRunner", "PrismRunner", "BundleBasedDirectRunner", "SwitchingDirectRunner"}


def pipeline_options(runner: RunnerConfig) -> Any:
    """Return Beam's `PipelineOptions` of `data.runner`; raises `ConfigError`."""
    beam = _beam()
    given = _parsed(beam, runner.options)
    name = given["runner"] or ""
    if name.lower().removesuffix("runner") in ("", "direct"):
        name = _DIRECT
    try:
        kind = type(_runner(name)).__name__
    # A class of any module is created.
    except Exception as error:
        raise ConfigError(
            f"data.runner.options: --runner={name}: {user_code.line_of(error)}"
        ) from error
    unknown = sorted(given.keys() - _parsed(beam, ()).keys())
    # Others have options that only their job server knows.
    if kind in _HERE and unknown:
        hint = nearest(unknown[0], sorted(_parsed(beam, ())))
        raise ConfigError(f"data.runner.options: Beam has no option --{unknown[0]}{hint}")
    options = beam.PipelineOptions([*runner.options, f"--runner={name}"])
    # Types are inferred from hints otherwise, which differ from what is handed on.
    options.view_as(beam.TypeOptions).pipeline_type_check = False
    return options


def require_reachable(config: DataConfig, root: str) -> None:
    """Refuse what workers on other machines do not reach; raises `ConfigError`.

    Args:
        config: the data section.
        root: `storage.root`.
    """
    if config.runner.name != "beam":
        return
    beam = _beam()
    options = pipeline_options(config.runner)
    name = options.view_as(beam.StandardOptions).runner
    loopback = options.view_as(beam.PortableOptions).environment_type == "LOOPBACK"
    if type(_runner(name)).__name__ in _HERE or loopback:
        return
    workers = f"data.runner: the workers of {name} do not reach"
    if storage.local_path(root):
        raise ConfigError(f"{workers} {root}; set storage.root to a bucket, or leave --runner out")
    named = [str(each) for each in vars(config.splits).values() if "://" in str(each)]
    for place in filter(None, [config.source, *named]):
        if "://" not in place or place.startswith("file:"):
            raise ConfigError(f"{workers} {place}; set data.source to a URI of a bucket")
    if not config.source and not os.environ.get("TFDS_DATA_DIR"):
        raise ConfigError(
            f"{workers} what TFDS makes of {config.dataset} here; set TFDS_DATA_DIR to a folder "
            "that they mount at the same path"
        )


def _beam() -> Any:
    try:
        from apache_beam.options import pipeline_options as module  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"data.runner: beam needs {error.name}: pip install 'flotilla[beam]'"
        ) from None
    return module


def _runner(name: str) -> Any:
    from apache_beam.runners.runner import create_runner  # noqa: PLC0415

    return create_runner(name)


def _parsed(beam: Any, flags: tuple[str, ...]) -> dict[str, Any]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = beam.PipelineOptions(list(flags)).get_all_options(retain_unknown_options=True)
    except SystemExit:
        reason = said.getvalue().strip().rpartition("error: ")[2]
        raise ConfigError(f"data.runner.options: {reason}") from None
    return dict(found)
