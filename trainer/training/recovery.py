"""What goes back when a parameter server dies: its own variables, or all of them.

Only the variables of the lost server go back: "partial recovery" (Maeng et al. 2020, "CPR:
Understanding and Improving Failure Tolerant Training for Deep Learning Recommendation with Partial
Recovery"), to the newest checkpoint, or with `cluster.snapshot_seconds` to the newest snapshot.

Where the strategy can and the server comes back soon, the chief connects with it again, gives it
its variables, and goes on (`trainer.strategies.remade`). Otherwise its attempt ends. Before, it
publishes a checkpoint of what is left (`trainer.checkpoints.joined`), from which its next attempt
begins. Where that is not wanted, not possible, or takes too long, all variables go back to the
newest checkpoint: full recovery.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import tensorflow as tf

from trainer import events
from trainer.checkpoints import joined
from trainer.checkpoints.checkpoints import Checkpoints, restore, resumed
from trainer.checkpoints.history import VALIDATION
from trainer.checkpoints.joined import Joined
from trainer.checkpoints.servers import server_of
from trainer.checkpoints.snapshots import Copied, Snapshots, give_back
from trainer.checkpoints.tensor_bundle import Variables
from trainer.cluster import liveness
from trainer.cluster.lease import NoLease
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.strategies.left_variables import LeftVariables, whole_only
from trainer.strategies.parameter_server import Served
from trainer.strategies.placement import in_own_line
from trainer.strategies.remade import Remade, is_lost
from trainer.strategies.strategy import Strategy
from trainer.topology import Task

Result = TypeVar("Result")
log = logging.getLogger(__name__)

# A server that has not answered for so long is taken as lost.
ANSWER_SECONDS = 10.0
# Asynchronous workers are not waited for any longer: they find no more turns, if they still run.
HALT_SECONDS = 20.0
# A server that is back so soon costs less than a new attempt. A probe of it, and a pause after one.
RETURN_SECONDS, PROBE_SECONDS, PAUSE_SECONDS = 30.0, 2.0, 0.05
# Each time leaves megabytes of the old graphs on the tasks that stay, until a new attempt begins.
MOST_REJOINS = 20
# Longer than a checkpoint of a large model takes, and shorter than most steps that are repeated.
LIMIT_SECONDS = 120.0
_NO_OTHER = "no other server has variables"


class ServerSnapshots:
    """What an attempt has on the servers besides: snapshots, and names for the next attempt."""

    def __init__(
        self, config: Config, strategy: Strategy, checkpoints: Checkpoints | None = None
    ) -> None:
        """Describe those of a run, which has these checkpoints."""
        self._config, self._strategy, self._checkpoints = config, strategy, checkpoints
        self._made: Snapshots | None = None
        self._is_wanted = bool(config.cluster.snapshot_seconds and strategy.publishes)
        self._left: LeftVariables | None = None

    def find(self, saved: int) -> int:
        """Look for what a chief that died has left; return the global step to begin at.

        `saved` is that of the newest checkpoint; -1: of none.

        Raises:
            OpError: a server is gone.
        """
        strategy, checkpoints = self._strategy, self._checkpoints
        if not (isinstance(strategy, Served) and checkpoints):
            return max(saved, 0)
        strategy.connect()
        self._left = LeftVariables(checkpoints.uri, strategy.cluster.count("ps"))
        other = "" if strategy.leaves_variables else "training.strategy is another"
        refused = other or whole_only(self._config, strategy)
        begins = self._left.begins_at(saved, checkpoints.newest_step, refused)
        if not refused:
            strategy.left = self._left
        return begins

    def seconds_since_save(self) -> float | None:
        """Return how long ago the newest checkpoint was published, for a chief before this one.

        It is None where the variables, now built, do not have the values that one has left.
        """
        return self._left.seconds_since_save() if self._left else None

    @contextmanager
    def lasting(self) -> Iterator[None]:
        """Free all of it at the end of the block, unless the next attempt may go on with it."""
        try:
            yield
        except BaseException as error:
            if not (isinstance(error, Exception) and is_lost(error)):
                self.end()
            raise
        self.end()

    def end(self) -> None:
        """Free the memory of all of it, where servers answer: training does not go on."""
        self._made = None
        if self._left:
            self._left.forget()

    def take_if_due(self, global_step: int, *, rests: bool) -> None:
        """Take a snapshot between two inner loops, if it is time.

        The first one takes memory, and a line says how much: workers are at work by then.

        Raises:
            OpError: a task is gone. What else fails ends the snapshots, and not training.
        """
        if self._left and self._checkpoints:
            self._left.note(self._checkpoints.published_step)
        if not self._is_wanted:
            return
        with self._or_without():
            self._made = made = self._made or self._new()
            if made.is_due(rests=rests):
                made.take(global_step)

    def _new(self) -> Snapshots:
        strategy, seconds = self._strategy, self._config.cluster.snapshot_seconds
        groups = strategy.row_groups if isinstance(strategy, Served) else ()
        held = joined.held_by(strategy.variables())
        made = Snapshots(held, groups, strategy.io_device, seconds)
        log.warning("cluster.snapshot_seconds: %s", made.needs())
        return made

    def of(self, lost: set[int], noticed: float) -> dict[int, Copied]:
        """Return the newest copies of lost servers, as far as they are left; see `Snapshots.of`."""
        return self._made.of(lost, noticed) if self._made else {}

    def give_back(self, copies: Mapping[int, Copied], variables: Variables) -> None:
        """Assign copies of lost servers to their variables, which were made again."""
        for each in copies.values():
            give_back(each.variables, variables, self._strategy.io_device)

    def remake(self, remade: Remade) -> None:
        """Make again the copies that are gone with servers."""
        if self._made:
            self._made.remake(remade)

    @contextmanager
    def _or_without(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if is_lost(error):
                raise
            log.warning("no more snapshots of the servers are taken: %s", _line(error))
            self._made, self._is_wanted = None, False


class Recovery:
    """What is done in an attempt when parameter servers are lost."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        config: Config,
        strategy: Strategy,
        checkpoints: Checkpoints,
        fields: Callable[[], Mapping[str, Any]],
        snapshots: ServerSnapshots,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Describe the attempt, whose strategy is built.

        `fields` returns those of the manifest of a checkpoint. What is lost is taken of `snapshots`
        where these have it. Where it `should_stop`, no server is waited for.
        """
        self._config, self._strategy = config, strategy
        self._checkpoints, self._fields = checkpoints, fields
        self._snapshots, self._should_stop = snapshots, should_stop
        self._variables = strategy.variables()
        self._held = joined.held_by(self._variables)
        self._rejoins = 0

    def goes_on(self, error: Exception, *, is_whole: bool) -> bool:
        """Keep what is left where servers are lost; return whether this attempt goes on with it.

        Otherwise the error has to be raised, and the next attempt begins from the newest
        checkpoint, whatever fails here.

        Args:
            error: what ended the loop.
            is_whole: whether the variables have values that training may begin with.
        """
        if not (is_lost(error) and self._strategy.publishes):
            return False
        try:
            return self._recover(is_whole=is_whole)
        except Exception as failure:
            log.warning("nothing is known of the servers: %s", _line(failure))
            return False

    def _recover(self, *, is_whole: bool) -> bool:
        """Keep what is left, and emit what goes back; return whether the attempt goes on."""
        noticed = time.monotonic()
        lost = joined.lost_of(self._held, ANSWER_SECONDS)
        if not lost:
            # It was a worker, or training stands still for another reason.
            return False
        # A read of the counter could fail now, or wait without end.
        reached, newest = self._strategy.read_step, self._newest()
        copies = {
            server: each
            for server, each in self._snapshots.of(lost, noticed).items()
            if each.global_step > newest
        }
        steps = [each.global_step for each in copies.values()]
        back_to = min(steps) if copies.keys() == lost else newest
        reason, done = self._reason(lost, copies.keys(), is_whole, (reached, back_to)), None
        if not reason and (back := self._rejoined(lost, copies, max(reached, newest))):
            self._say(lost, back, is_partial=True, rejoined=True)
            return True
        if not reason and isinstance(self._checkpoints.lease, _Abandoned):
            # What still joins them may do anything at any time.
            reason = "the servers that came back were not joined in time"
        if not reason:
            try:
                done = self._within_limit(
                    lambda: self._partial(lost, copies), self._checkpoints.flush
                )
            except Exception as error:
                reason = _line(error)
        if not done:
            # One that was on its way may be published since.
            newest = max(newest, self._newest())
        is_partial = bool(done) and lost != set(self._held)
        step = max(reached, done.global_step if done else newest)
        back = _Back(step=step, to=done.back_to if done else newest, age=done.age if done else 0.0)
        reason = _NO_OTHER if done and not is_partial else reason
        self._say(lost, back, is_partial=is_partial, reason=reason)
        return False

    @staticmethod
    def _say(lost: set[int], back: _Back, *, is_partial: bool, **more: Any) -> None:
        events.emit(
            events.ServersLost(
                servers=tuple(f"ps-{number}" for number in sorted(lost)),
                recovery="partial" if is_partial else "full",
                global_step=back.step,
                back_to=back.to,
                snapshot_age=back.age,
                **more,
            )
        )

    def _reason(
        self, lost: set[int], copied: Collection[int], is_whole: bool, steps: tuple[int, int]
    ) -> str:
        """Return why nothing but the newest checkpoint is left, or an empty text.

        `steps` are the global step that was reached, and that of the values which would go back.
        """
        is_auto = self._config.cluster.recovery == "auto"
        reached, back_to = steps
        left = self._config.training.steps - reached
        is_all = lost == set(self._held)
        reasons = {
            "averages were in the place of weights, for a validation": not is_whole,
            _NO_OTHER: is_all and not lost <= set(copied),
            # What the lost server held would end with fewer updates than it had.
            "cluster.recovery is auto, and fewer steps are left than its values go back": is_auto
            and not is_all
            and left < reached - back_to,
        }
        whole = whole_only(self._config, self._strategy)
        return whole or next((reason for reason, is_so in reasons.items() if is_so), "")

    def _rejoined(self, lost: set[int], copies: Mapping[int, Copied], reached: int) -> _Back | None:
        """Go on with lost servers that are back soon; return what goes back, or None."""
        strategy = self._strategy
        if not isinstance(strategy, Served) or not strategy.rejoins or lost == set(self._held):
            return None
        if self._rejoins >= MOST_REJOINS:
            return None
        if not self._are_back() or not self._are_halted():
            return None
        try:
            back = self._within_limit(lambda: self._rejoin(strategy, lost, copies, reached))
        except Exception as error:
            log.warning("a new attempt begins, as the servers are not joined: %s", _line(error))
            return None
        self._rejoins += 1
        return back

    def _are_back(self) -> bool:
        """Wait until all servers and workers answer; return whether they do soon."""
        # TensorFlow connects with all of them, and waits without end for one that is not there.
        cluster = self._strategy.cluster
        tasks = [
            Task(role=role, index=each)
            for role in ("ps", "worker")
            for each in range(cluster.count(role))
        ]
        deadline = time.monotonic() + RETURN_SECONDS
        while time.monotonic() < deadline and not self._is_to_stop():
            found = liveness.probe(cluster, tasks, PROBE_SECONDS)
            if set(found.silent) - set(found.cut_off):
                # It was stopped, and is not started again.
                return False
            if not found.gone and not found.cut_off:
                return True
            time.sleep(PAUSE_SECONDS)
        return False

    def _is_to_stop(self) -> bool:
        # A save that the loss has ended raises here too.
        with suppress(UserError):
            return self._should_stop()
        return False

    def _rejoin(
        self, strategy: Served, lost: set[int], copies: Mapping[int, Copied], reached: int
    ) -> _Back:
        # Another chief may have what the other servers hold.
        self._checkpoints.lease.check()
        parts = self._checkpoints.parts
        if parts and parts.is_busy():
            self._checkpoints.without_lost()
        others = {
            path: each
            for server in lost - copies.keys()
            for path, each in self._held[server].items()
        }
        found = self._checkpoints.newest() if others else None
        values = resumed(found, others, self._config.training) if found else {}
        if values.keys() != others.keys():
            raise UserError("no checkpoint has what they held")

        def assign() -> None:
            self._snapshots.give_back(copies, self._variables)
            if found:
                servers = self._checkpoints.servers
                restore(found, values, io_device=strategy.io_device, servers=servers)
            counter = self._variables[joined.STEP]
            if server_of(counter) in lost:
                counter.assign(reached)

        strategy.rejoin(lost, self._snapshots.remake, assign)
        older = joined.older_in(found, others).values() if found else ()
        steps = [each.global_step for each in (*copies.values(), *older)]
        age = 0.0 if found else max(each.age for each in copies.values())
        return _Back(step=strategy.global_step(), to=min(steps), age=age)

    def _are_halted(self) -> bool:
        """End what workers do; return whether nothing runs any more."""
        # TensorFlow waits for a worker that looks lost until all servers are there again.
        halted = threading.Thread(target=self._strategy.halt, name="halt", daemon=True)
        halted.start()
        halted.join(HALT_SECONDS if self._strategy.mixes_steps else None)
        return not halted.is_alive()

    def _partial(self, lost: set[int], copies: Mapping[int, Copied]) -> Joined:
        self._are_halted()
        fields = self._fields()
        # A validation was of other values.
        metrics = {
            name: each
            for name, each in fields["metrics"].items()
            if not name.startswith(VALIDATION)
        }
        return joined.save(
            self._checkpoints,
            self._variables,
            lost,
            io_device=self._strategy.io_device,
            fields={**fields, "metrics": metrics},
            read_step=self._strategy.read_step,
            copies=copies,
        )

    def _within_limit(
        self, work: Callable[[], Result], afterwards: Callable[[], None] = lambda: None
    ) -> Result:
        done: list[Result | BaseException] = []

        def run() -> None:
            try:
                # The coordinator still runs into the loss, on threads of its own.
                with in_own_line():
                    done.append(work())
            except BaseException as error:
                done.append(error)
                return
            # It is valid on this machine, which may go with the task.
            with suppress(UserError):
                afterwards()

        thread = threading.Thread(target=run, name="recovery", daemon=True)
        thread.start()
        thread.join(LIMIT_SECONDS)
        if not done:
            self._checkpoints.lease = _Abandoned()
            raise UserError(f"it was not done after {LIMIT_SECONDS:g} s")
        (found,) = done
        if isinstance(found, BaseException):
            raise found
        return found

    def _newest(self) -> int:
        """Return the global step of the newest checkpoint; -1 where the store does not answer."""
        try:
            return self._checkpoints.newest_step()
        except UserError:
            return -1


@dataclass(frozen=True, kw_only=True)
class _Back:
    """The global step that was reached, that of what goes back, and the age of its snapshot."""

    step: int
    to: int
    age: float = 0.0


class _Abandoned(NoLease):
    """Lets nothing be published that is late."""

    def require(self) -> None:
        self.check()

    def check(self) -> None:
        raise UserError("it is too late")


def _line(error: Exception) -> str:
    text = error.message if isinstance(error, tf.errors.OpError) else str(error)
    lines = str(text).strip().splitlines() or [type(error).__name__]
    return lines[0] if isinstance(error, UserError) else f"{type(error).__name__}: {lines[0]}"
