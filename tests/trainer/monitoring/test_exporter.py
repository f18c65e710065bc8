"""The server of the metrics: where it listens, and that nothing about it ends training."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Gauge

from tests.trainer.monitoring.test_metrics import scrape
from trainer import events, variables
from trainer.cluster.launcher import Job
from trainer.cluster.loopback import EVERY_HOST, METRICS_HOST
from trainer.config.load import parse_config
from trainer.errors import ConfigError
from trainer.monitoring import exporter
from trainer.topology import Cluster, Task

CHIEF = Task(role="chief", index=0)
ALONE = Cluster(addresses={"chief": ("127.0.0.1:1",)})


@pytest.fixture
def registry():
    made = CollectorRegistry()
    Gauge("flotilla_answer", "of the test", registry=made).set(42)
    return made


@pytest.fixture
def serving(registry):
    servers = []

    def serve(port=0):
        server = exporter.served(registry, port)
        servers.append(server)
        return server

    yield serve
    for server in filter(None, servers):
        server.shutdown()
        server.server_close()


def job_at(folder, port):
    config = parse_config({"cluster": {"metrics_port": port}})
    checkpoints = (folder / "digits-1" / "checkpoints").as_uri()
    return Job(config=config, dataset="", checkpoints=checkpoints, workdir=folder / "chief-0")


def test_on_this_machine_only_one_address_is_served_that_of_loopback(serving):
    port = serving().server_port
    assert scrape(port) == {("flotilla_answer",): 42}
    with pytest.raises(OSError, match="refused"):
        scrape(port, "127.0.0.2")


def test_in_a_pod_every_address_is(serving, monkeypatch):
    monkeypatch.setenv(METRICS_HOST, EVERY_HOST)
    server = serving()
    hosts = ["127.0.0.1", "127.0.0.2"]
    if server.address_family == socket.AF_INET6:
        hosts.append("[::1]")
    for host in hosts:
        assert scrape(server.server_port, host) == {("flotilla_answer",): 42}


def test_an_address_may_be_named(serving, monkeypatch):
    monkeypatch.setenv(METRICS_HOST, "127.0.0.2")
    assert scrape(serving().server_port, "127.0.0.2")


@pytest.mark.parametrize("host", ["", "*", "127.0.0.1", "::1", "a-host.example"])
def test_an_address_that_is_none_is_refused_before_anything_begins(monkeypatch, host):
    monkeypatch.setenv(METRICS_HOST, host)
    assert variables.checked(METRICS_HOST) == host
    monkeypatch.setenv(METRICS_HOST, "a b")
    with pytest.raises(ConfigError, match="an address of this machine, or \\* for all"):
        variables.check()


@pytest.mark.parametrize("host", ["", "*"])
def test_a_port_that_is_taken_is_one_warning(tmp_path, monkeypatch, caplog, host):
    monkeypatch.setenv(METRICS_HOST, host)
    heard = []
    with socket.create_server(("", 0)) as holder, events.heard_by(heard.append):
        port = holder.getsockname()[1]
        with exporter.exported(job_at(tmp_path, port), ALONE, CHIEF):
            pass
    [event] = [each for each in heard if isinstance(each, events.MetricsUnserved)]
    assert f"cluster.metrics_port: {port} on " in event.reason
    assert "Address already in use" in event.reason
    assert caplog.text.count("no metrics for Prometheus: ") == 1


def test_it_is_off_where_no_port_is_set(tmp_path, monkeypatch):
    monkeypatch.setattr(exporter, "served", None)
    with exporter.exported(job_at(tmp_path, 0), ALONE, CHIEF):
        assert not (tmp_path / "chief-0").exists()


def test_a_run_is_served_in_its_block_and_not_after_it(tmp_path, port):
    for _ in range(2):
        with exporter.exported(job_at(tmp_path, port), ALONE, CHIEF):
            progress = events.Progress(
                global_step=7, steps=9, loss=0.5, steps_per_second=2.0, seconds_left=1.0
            )
            events.emit(progress)
            found = scrape(port)
        assert found["flotilla_global_step",] == 7
        assert found["flotilla_tasks_alive", "chief"] == 1
        assert found["process_resident_memory_bytes",] > 0
        with pytest.raises(OSError, match="refused"):
            scrape(port)


def test_only_reading_is_answered(serving):
    url = f"http://127.0.0.1:{serving().server_port}/metrics"
    with pytest.raises(urllib.error.HTTPError, match="405") as refused:
        urllib.request.urlopen(url, data=b"x", timeout=60)
    refused.value.close()
