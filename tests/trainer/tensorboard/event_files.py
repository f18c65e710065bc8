"""What TensorBoard itself reads of a folder of logs."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.plugins.hparams import metadata


def loaded(logs: Path) -> EventMultiplexer:
    """Return TensorBoard's own view of a folder, as `tensorboard --logdir` has it."""
    found = EventMultiplexer().AddRunsFromDirectory(str(logs))
    found.Reload()
    return found


def scalars(logs: Path) -> list[tuple[str, int, str, float]]:
    """Return each value with its run, step and tag."""
    view = loaded(logs)
    return sorted(
        (run, event.step, tag, float(tf.make_ndarray(event.tensor_proto)))
        for run, tags in view.Runs().items()
        for tag in tags["tensors"]
        if not tag.startswith("_hparams_")
        for event in view.Tensors(run, tag)
    )


def hyperparameters(logs: Path, run: str) -> tuple[str, dict[str, object]]:
    """Return the group and the values that the plugin finds for a run."""
    summary = loaded(logs).SummaryMetadata(run, metadata.SESSION_START_INFO_TAG)
    info = metadata.parse_session_start_info_plugin_data(summary.plugin_data.content)
    values = {name: getattr(each, each.WhichOneof("kind")) for name, each in info.hparams.items()}
    return info.group_name, values
