"""Strategies by name, and the roles that each one needs."""

from __future__ import annotations

from trainer import user_code
from trainer.config.schema import Config
from trainer.errors import ConfigError
from trainer.strategies.strategy import Strategy
from trainer.topology import Cluster, Task

_BUILT_IN = {
    "single": "trainer.strategies.mirrored:Single",
    "async_parameter_server": "trainer.strategies.async_parameter_server:AsyncParameterServer",
    "sync_parameter_server": "trainer.strategies.sync_parameter_server:SyncParameterServer",
    "in_graph": "trainer.strategies.in_graph:InGraph",
    "multi_worker_mirrored": "trainer.strategies.mirrored:MultiWorkerMirrored",
}


def create(config: Config, cluster: Cluster, task: Task) -> Strategy:
    """Return `training.strategy` (a built-in one, or `package.module:Class`) for one task.

    Raises:
        ConfigError: there is no such class, or it is not a `Strategy`.
    """
    name = config.training.strategy
    module_name, _, class_name = _BUILT_IN.get(name, name).partition(":")
    try:
        strategy = getattr(user_code.import_module(module_name), class_name)
    # A module of the user's may fail in any way while it is imported.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"training.strategy: cannot import {name!r}: {reason}") from error
    if not (isinstance(strategy, type) and issubclass(strategy, Strategy)):
        raise ConfigError(f"training.strategy: {name!r} is not a subclass of Strategy")
    if lacking := sorted(strategy.__abstractmethods__):
        raise ConfigError(f"training.strategy: {name!r} does not define {', '.join(lacking)}")
    return strategy(config, cluster, task)
