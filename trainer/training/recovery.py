"""Recovery: an attempt reuses the values on living servers, and restores the others.

After the chief or parameter servers have died, the variables on living servers are newer than any
checkpoint, and are kept (`flotilla.trainer.strategies.server_state`). The variables of a restarted
server are restored from the newest checkpoint: "partial recovery" (Maeng et al. 2020, "CPR:
Understanding and Improving Failure Tolerant Training for Deep Learning Recommendation with Partial
Recovery"). If variables of different steps must not be combined, or no server is alive, all
variables are restored from the newest checkpoint: full recovery.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from flotilla.trainer import events
from flotilla.trainer.checkpoints.checkpoints import (
    Checkpoints,
    RestoredCheckpoint,
    restore,
    select_resumed,
)
from flotilla.trainer.config.data import DYNAMIC
from flotilla.trainer.config.schema import Config
from flotilla.trainer.strategies.server_state import STEP, ServerState, is_lost
from flotilla.trainer.strategies.strategy import Strategy


def explain_full_recovery(config: Config, strategy: Strategy) -> str:
    """Return why all variables must have the same global step, or "" if they need not."""
    wanted = config.cluster.recovery
    reasons = {
        "cluster.recovery is full": wanted == "full",
        "cluster.recovery is auto, and training is synchronous": wanted == "auto"
        and not strategy.capabilities.mixes_steps,
        "data.partition is dynamic: no example may count twice": config.data.partition == DYNAMIC,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


class Recovery:
    """Determines the initial variables of an attempt: kept on the servers, or restored."""

    def __init__(self, config: Config, strategy: Strategy, checkpoints: Checkpoints) -> None:
        """Store the arguments. The strategy is not built yet."""
        self._config, self._strategy, self._checkpoints = config, strategy, checkpoints
        self._state: ServerState | None = None
        self._begins = 0

    def find_begin(self, found: RestoredCheckpoint | None) -> int:
        """Find living servers before the strategy is built, and return the initial global step."""
        self._begins = found.global_step if found else 0
        state = self._state = self._strategy.find_state(self._checkpoints.uri)
        if not state or not state.found:
            return self._begins
        living, reached = state.living, state.read_reached()
        if reason := self._refuse(state, found, reached):
            lost = state.servers - state.found.keys()
            state.remove(reason)
        else:
            lost = state.servers - living
            state.select(living)
        if lost:
            events.emit(
                events.ServersLost(
                    servers=tuple(f"ps-{number}" for number in sorted(lost)),
                    recovery="full" if reason else "partial",
                    global_step=max(reached, self._begins),
                    back_to=self._begins,
                    reason=reason,
                )
            )
        if not reason:
            self._begins = reached
        return self._begins

    def _refuse(self, state: ServerState, found: RestoredCheckpoint | None, reached: int) -> str:
        """Return why all variables are restored from the checkpoint, or "" for partial recovery."""
        if reason := explain_full_recovery(self._config, self._strategy):
            return reason
        if not found:
            return "no checkpoint is published"
        living = [state.found[number] for number in state.living]
        left, back = self._config.training.steps - reached, reached - found.global_step
        auto_loses = self._config.cluster.recovery == "auto" and state.living != state.servers
        reasons = {
            "the chief was assigning values": not living,
            "no other server holds variables": not any(each.held for each in living),
            # A user who deletes a checkpoint also wants to discard the values that followed it.
            "a checkpoint that was published before no longer exists": (
                max((each.saved for each in living), default=-1) > self._checkpoints.newest_step()
            ),
            "no running server has the global step": reached < 0,
            "the newest checkpoint is newer than the variables on the servers": reached
            < found.global_step,
            # The lost server's variables would end with fewer updates than they had before.
            "cluster.recovery is auto, and too few steps remain to repeat the lost updates": (
                auto_loses and left < back
            ),
        }
        return next((reason for reason, is_so in reasons.items() if is_so), "")

    def restore(self, found: RestoredCheckpoint | None) -> Mapping[str, tf.Variable]:
        """Restore lost variables, and return all that were kept or restored. Raises `UserError`."""
        variables, state = self._strategy.variables(), self._state
        if not found:
            return {}
        lost = {
            path: each
            for path, each in variables.items()
            if not (state and state.is_taken(each.device))
        }
        restored = select_resumed(found, lost, self._config.training) if lost else {}
        if restored:
            io_device, servers = self._strategy.io_device, self._checkpoints.servers
            restore(found, restored, io_device=io_device, servers=servers)
        if state and state.taken and lost:
            self.note(self._begins)
            state.note_reverted(found.global_step)
            if STEP in lost:
                lost[STEP].assign(self._begins)
        return {path: variables[path] for path in variables.keys() - lost.keys() | restored.keys()}

    def list_recovered(self) -> dict[str, Any]:
        """Describe the variables that were reset since the newest published checkpoint."""
        return {
            f"ps-{number}": {
                "global_step": step,
                "variables": sorted(
                    path
                    for path, each in self._strategy.variables().items()
                    if path != STEP and tf.DeviceSpec.from_string(each.device).task == number
                ),
            }
            for number, step in (self._state.list_reverted() if self._state else {}).items()
        }

    def seconds_since_save(self) -> float:
        """Return the seconds since the newest checkpoint if later values were kept, or 0."""
        return self._state.seconds_since_save() if self._state else 0.0

    def note(self, global_step: int) -> None:
        """Store the global step on the servers, between two inner loops. Raises `OpError`."""
        if self._state:
            self._state.note(self._checkpoints.published_step, global_step)

    @contextmanager
    def free_at_end(self) -> Iterator[None]:
        """Free the servers' variables at the end of the block, unless an attempt may follow."""
        try:
            yield
        except BaseException as error:
            if self._state and not (isinstance(error, Exception) and is_lost(error)):
                self._state.forget()
            raise
        if self._state:
            self._state.forget()
