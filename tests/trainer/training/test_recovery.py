"""Tests that an attempt keeps the values on running servers, and restores the others."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import tensorflow as tf

from flotilla.trainer.checkpoints.checkpoints import Checkpoints, RestoredCheckpoint
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.topology import find_topology
from flotilla.trainer.events import ServersLost, listen
from flotilla.trainer.runtime.errors import ClusterLostError, UserError
from flotilla.trainer.strategies.server_state import STEP, ServerState
from flotilla.trainer.strategies.strategy import Strategy
from flotilla.trainer.training import recovery
from flotilla.trainer.training.recovery import Recovery

FOUND = RestoredCheckpoint(uri="file:///step-400", global_step=400, folder=Path(), fields={})
#: The server of each variable.
PLACES = {"a": 0, "b": 1, "c": 2, STEP: 0}


class Variable:
    def __init__(self, server):
        self.device, self.value = f"/job:ps/replica:0/task:{server}/device:CPU:0", None

    def assign(self, value):
        self.value = value


def state_of(lost, whole, reached, saved, held):
    """Return the state of three servers, of which `lost` were lost and `whole` are complete."""
    there = [n for n in range(3) if n not in lost]
    living = frozenset(there) & set(whole)
    found = {n: SimpleNamespace(held=held[n], saved=saved) for n in there}
    state = create_autospec(
        ServerState, instance=True, servers=frozenset(range(3)), found=found, living=living
    )
    state.taken = frozenset()
    state.read_reached.return_value = reached if living else -1
    state.select.side_effect = lambda servers: setattr(state, "taken", servers)
    state.is_taken.side_effect = lambda device: (
        tf.DeviceSpec.from_string(device).task in state.taken
    )
    state.list_reverted.return_value = {}
    return state


def led(strategy, state, variables):
    made = create_autospec(Strategy, instance=True, io_device=None)
    made.configure_mock(capabilities=find_topology(strategy).capabilities)
    made.variables.return_value = variables
    made.find_state.return_value = state
    return made


@pytest.fixture
def begin(monkeypatch):
    """Return a function that starts an attempt after servers were lost at step 510 of 1500."""
    monkeypatch.setattr(recovery, "select_resumed", lambda _found, given, _training: dict(given))

    def begun(  # noqa: PLR0913
        tree=None,
        *,
        lost=(1,),
        strategy="async_parameter_server",
        reached=510,
        whole=(0, 1, 2),
        saved=400,
        held=(2, 2, 2),
        found=FOUND,
    ):
        state = state_of(lost, whole, reached, saved, held)
        variables = {path: Variable(server) for path, server in PLACES.items()}
        checkpoints = create_autospec(Checkpoints, instance=True, uri="file:///run", servers=None)
        checkpoints.published_step = saved
        checkpoints.newest_step.return_value = 400
        restored, heard = [], []
        monkeypatch.setattr(recovery, "restore", lambda _found, given, **_: restored.extend(given))
        made = Recovery(parse_config(tree or {}), led(strategy, state, variables), checkpoints)
        with listen(heard.append):
            begins = made.find_begin(found)
        kept = made.restore(found)
        return SimpleNamespace(
            heard=heard,
            begins=begins,
            why="".join(each.args[0] for each in state.remove.call_args_list),
            restored=sorted(restored),
            kept=sorted(kept),
            state=state,
            made=made,
            variables=variables,
        )

    return begun


@pytest.mark.parametrize(
    ("given", "lost", "restored"),
    [
        ({"lost": (1,)}, [1], ["b"]),
        # The count of steps stays where its server is lost.
        ({"lost": (0,)}, [0], ["a", STEP]),
        ({"lost": (2, 0)}, [0, 2], ["a", "c", STEP]),
        # A server that was being restored is restored again.
        ({"lost": (), "whole": (0, 2)}, [1], ["b"]),
        # Where the chief alone died, nothing is restored or said.
        ({"lost": ()}, [], []),
    ],
)
def test_what_is_alive_is_taken_and_what_is_lost_is_restored(begin, given, lost, restored):
    found = begin(**given)
    servers = tuple(f"ps-{number}" for number in lost)
    event = ServersLost(servers=servers, recovery="partial", global_step=510, back_to=400)
    assert found.heard == [event] * bool(lost)
    assert (found.begins, found.why, found.restored) == (510, "", restored)
    assert found.kept == sorted(PLACES)
    found.state.select.assert_called_once_with(frozenset(range(3)) - {*lost})
    assert [each.args for each in found.state.note_reverted.mock_calls] == [(400,)] * bool(lost)
    assert found.variables[STEP].value == (510 if STEP in restored else None)


@pytest.mark.parametrize(
    ("tree", "strategy", "why"),
    [
        ({"cluster": {"recovery": "auto"}}, "async_parameter_server", ""),
        ({"cluster": {"recovery": "auto"}}, "sync_parameter_server", "training is synchronous"),
        ({"cluster": {"recovery": "partial"}}, "sync_parameter_server", ""),
        ({"cluster": {"recovery": "full"}}, "async_parameter_server", "cluster.recovery is full"),
        ({"data": {"partition": "dynamic"}}, "async_parameter_server", "no example may count"),
    ],
)
def test_what_is_configured_and_the_strategy_decide(begin, tree, strategy, why):
    found = begin(tree, strategy=strategy)
    (event,) = found.heard
    assert event.recovery == ("full" if why else "partial")
    assert why in event.reason == found.why
    assert found.begins == (400 if why else 510)
    assert found.restored == (sorted(PLACES) if why else ["b"])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"whole": ()}, "the chief was assigning values"),
        ({"held": (0, 2, 0), "lost": (1,)}, "no other server holds variables"),
        ({"saved": 500}, "a checkpoint that was published before no longer exists"),
        ({"reached": 399}, "the newest checkpoint is newer than the variables on the servers"),
        ({"reached": -1}, "no running server has the global step"),
        ({"found": None}, "no checkpoint is published"),
    ],
)
def test_where_it_is_not_possible_all_go_back(begin, given, why):
    found = begin(**given)
    assert (found.why, found.heard[0].recovery, found.heard[0].reason) == (why, "full", why)
    assert found.begins == (0 if why.startswith("no checkpoint") else 400)
    assert found.restored == ([] if given.get("found", FOUND) is None else sorted(PLACES))


def test_near_the_end_all_go_back_so_that_no_server_ends_behind(begin):
    near = {"reached": 1000}
    assert "too few steps remain to repeat the lost updates" in begin(**near).why
    assert begin({"cluster": {"recovery": "partial"}}, **near).why == ""
    assert begin(**near, lost=()).why == ""


def test_a_run_whose_servers_have_nothing_begins_with_the_checkpoint(begin):
    found = begin(lost=(0, 1, 2))
    assert (found.heard, found.begins, found.why) == ([], 400, "")
    assert found.restored == sorted(PLACES)


def test_a_checkpoint_says_which_values_went_back(begin):
    found = begin()
    found.state.list_reverted.return_value = {1: 400}
    assert found.made.list_recovered() == {"ps-1": {"global_step": 400, "variables": ["b"]}}
    found.state.list_reverted.return_value = {}
    assert found.made.list_recovered() == {}


@pytest.mark.parametrize(
    ("error", "frees"),
    [
        (None, True),
        (UserError("the loss is not finite"), True),
        (KeyboardInterrupt(), True),
        (ClusterLostError("ps-1"), False),
        (tf.errors.UnavailableError(None, None, "ps-1"), False),
    ],
)
def test_values_stay_on_the_servers_where_an_attempt_may_follow(begin, error, frees):
    found = begin(lost=())
    try:
        with found.made.free_at_end():
            if error:
                raise error
    except type(error or Exception()):
        pass
    assert found.state.forget.called == frees
