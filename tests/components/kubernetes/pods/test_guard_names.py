"""Tests that the guard reports exactly the names of other tasks that do not resolve."""

import pytest

from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.pods import guard
from flotilla.components.kubernetes.pods.guard import PeerNames
from flotilla.trainer.config.topology import Cluster

CLUSTER = Cluster(
    addresses={"chief": ("a-chief-0-0.a:2222",), "ps": ("a-ps-0-0.a:2222", "a-ps-1-0.a:2222")}
)


class Resolver:
    """A resolver that knows only the given names; `at` is the current time in seconds."""

    def __init__(self, *known: str) -> None:
        self.known, self.asked, self.at = set(known), [], 0.0

    def __call__(self, name: str, _port: int) -> None:
        self.asked.append(name)
        if name not in self.known:
            raise OSError(-2, "Name or service not known")

    def clock(self) -> float:
        return self.at


@pytest.fixture
def resolver():
    return Resolver("a-chief-0-0.a")


@pytest.fixture
def peers(resolver):
    return PeerNames(CLUSTER, resolver, resolver.clock)


def test_names_that_never_resolve_are_said_once_by_name(resolver, peers, caplog):
    assert peers.look()
    assert not caplog.messages
    resolver.at = guard.NAMES_SECONDS
    for _ in range(3):
        assert peers.look()
    assert caplog.messages == [f"{names.UNRESOLVED}a-ps-0-0.a, a-ps-1-0.a"]
    assert resolver.asked.count("a-chief-0-0.a") == 1


def test_that_they_resolve_later_is_said_as_well(resolver, peers, caplog):
    resolver.at = guard.NAMES_SECONDS
    assert peers.look()
    resolver.known |= {"a-ps-0-0.a", "a-ps-1-0.a"}
    assert not peers.look()
    assert caplog.messages[1:] == [names.RESOLVED]


def test_names_that_resolve_in_time_are_not_mentioned(resolver, peers, caplog):
    peers.look()
    resolver.known |= {"a-ps-0-0.a", "a-ps-1-0.a"}
    resolver.at = 10 * guard.NAMES_SECONDS
    assert not peers.look()
    assert not caplog.messages
