"""A chief that starts from the values on the servers, trains, and then kills itself.

Run it with `python -m tests.cluster.leaving SPEC`. SPEC is a JSON file with `config` (sections that
differ from the defaults), `uri` (of the run's checkpoints), `saved` (global step of the newest
checkpoint, or -1), `layers` (number of additional layers) and `torn` (whether the chief dies while
it assigns values). The chief prints a JSON line with the values that it found and the values that
it left.
"""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
from keras.src.utils.naming import reset_uids

from flotilla.trainer.checkpoints.checkpoints import Checkpoints, RestoredCheckpoint
from flotilla.trainer.config.schema import Config
from flotilla.trainer.embeddings.embedding_table import EmbeddingTable
from flotilla.trainer.embeddings.sharded_embedding import ShardedEmbedding
from flotilla.trainer.strategies import placement
from flotilla.trainer.strategies.strategy import Problem
from flotilla.trainer.training import recovery
from tests.cluster.lead import begin, say
from tests.cluster.problems import of_ids

IDS, ROWS, STEPS, BATCH = 50, 400, 20, 8


def problem(config: Config, *, layers: int = 0) -> Problem:
    def looked_up(given: Any) -> Any:
        # All models of a run must have the same variable names.
        reset_uids()
        rows = ShardedEmbedding(ROWS, 4, name="table")(given)
        grown = EmbeddingTable(2 * IDS, 4, name="grown")(given)
        found = keras.layers.Concatenate()([rows, grown])
        for _ in range(layers):
            found = keras.layers.Dense(8)(found)
        return found

    return of_ids(config, looked_up, lambda n: (n % IDS, n % 2), BATCH)


def main() -> None:
    """Start a run as a real chief does, then kill this process."""
    spec, strategy = begin()
    # Most variables are larger than this limit, so they have no values until they are bound to the
    # values on the servers.
    placement.LARGE_BYTES = 64
    assert strategy.capabilities.keeps_values
    checkpoints = Checkpoints(spec["uri"], keep=1, scratch=Path("scratch"))
    checkpoint = RestoredCheckpoint(
        uri=spec["uri"], global_step=spec["saved"], folder=Path(), fields={}
    )
    # Do not read the checkpoint, so that variables without values on the servers keep their initial
    # values.
    recovery.restore = lambda *_, **__: None
    recovery.select_resumed = lambda _found, variables, _training: variables
    begins = recovery.Recovery(strategy.config, strategy, checkpoints)
    found = begins.find_begin(checkpoint if spec["saved"] >= 0 else None)
    strategy.build(problem(strategy.config, layers=spec["layers"]))
    begins.restore(SimpleNamespace(global_step=spec["saved"]))
    strategy.refresh()
    begun = values_of(strategy.variables())
    strategy.settle(is_whole=True)
    strategy.run(STEPS)
    begins.note(strategy.global_step())
    if spec["torn"]:
        strategy.settle(is_whole=False)
    left = values_of(strategy.variables())
    say(
        found=found,
        taken=sorted(strategy.state.taken),
        begun=begun,
        step=strategy.global_step(),
        left=left,
        devices={path: each.device for path, each in strategy.variables().items()},
        metrics=strategy.metrics()["tables"],
    )
    os.kill(os.getpid(), signal.SIGKILL)


def values_of(variables: Any) -> dict[str, Any]:
    return {path: each.numpy().tolist() for path, each in variables.items()}


if __name__ == "__main__":
    main()
