"""Tests that requests to this machine bypass any proxy."""

import importlib
import urllib.request

import pytest

from flotilla import trainer


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"http_proxy": "http://p:1"}, "localhost,127.0.0.1,::1"),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": ".corp"}, ".corp,localhost,127.0.0.1,::1"),
        ({"all_proxy": "socks5://p:1", "no_proxy": "a,b"}, "a,b,localhost,127.0.0.1,::1"),
        ({"http_proxy": "http://p:1", "no_proxy": "*"}, "*"),
        ({"no_proxy": "a"}, "a"),
        ({}, None),
    ],
)
def test_loopback_is_reached_directly(monkeypatch, before, after):
    for kind in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{kind}_proxy", raising=False)
        monkeypatch.delenv(f"{kind}_proxy".upper(), raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    # Set the variable, so that monkeypatch restores it after the package has changed it.
    monkeypatch.setenv("no_proxy", before.get("no_proxy", ""))
    # The second reload simulates a child process, whose parent has already set the variable.
    for _ in range(2):
        importlib.reload(trainer)
    found = trainer.os.environ["no_proxy"]
    assert (found or None) == after
    assert bool(urllib.request.proxy_bypass("127.0.0.1")) == bool(after and after != "a")
