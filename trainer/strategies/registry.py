"""Make a strategy by its name, or by the user's own `package.module:Class`."""

from __future__ import annotations

from trainer import user_code
from trainer.config.schema import Config
from trainer.errors import ConfigError
from trainer.strategies.strategy import Strategy
from trainer.topology import Cluster, Task, topology_of


def create(config: Config, cluster: Cluster, task: Task) -> Strategy:
    """Return `training.strategy` (a built-in one, or `package.module:Class`) for one task.

    Raises:
        ConfigError: there is no such class, or it is not a `Strategy`.
    """
    name = config.training.strategy
    module_name, _, class_name = topology_of(name).implementation.partition(":")
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
