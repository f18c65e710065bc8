"""Tests a run's metrics, and which tasks are reported as alive and as restarted."""

import json
import re
import socket
import urllib.error
import urllib.request

import prometheus_client
import pytest
import yaml
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from flotilla.trainer import events
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.cluster.liveness import Peers
from flotilla.trainer.cluster.loopback import EVERY_HOST, METRICS_HOST
from flotilla.trainer.cluster.process import STARTS
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.runtime.environment import check_variables, read_variable
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.telemetry.metrics import (
    FILE,
    RunMetrics,
    TaskWatch,
    export_metrics,
    serve_registry,
)
from tests.conftest import ROOT


def parsed(text):
    """Return the samples, keyed by name and label values."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(port, host="127.0.0.1"):
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return parsed(answer.read().decode())


ALERTS = ROOT / "deploy/monitoring/alerts.yaml"
PAGE = ROOT / "docs/how-to/metrics.md"
PROGRESS = events.Progress(
    time=1000.0, global_step=40, steps=90, loss=0.5, steps_per_second=20.0, seconds_left=2.5,
    seconds=3.0, learning_rate=0.25, metrics={
        "staleness_mean": 1.5, "epoch": 2,
        "workers": {"worker-0": {"local_steps": 3, "examples": 192},
                    "worker-1": {"local_steps": 1, "examples": 64}},
    },
)  # fmt: skip
EVENTS = [
    events.AttemptBegin(global_step=0, steps=90, resumed=False),
    PROGRESS,
    events.Validation(global_step=40, metrics={"loss": 0.75, "accuracy": 0.875}),
    events.Saved(uri="file:///c/step-40", global_step=40, seconds=0.125),
    events.UploadFailed(reason="away"),
    events.CheckpointPublished(time=2000.0, uri="file:///c/step-40", global_step=40),
]


@pytest.fixture
def metrics():
    config = parse_config({"name": "digits", "training": {"steps": 90, "profile": []}})
    return RunMetrics(config, "digits-1")


def text_of(metrics):
    return prometheus_client.generate_latest(metrics.registry).decode()


def of(metrics):
    return {k: v for k, v in parsed(text_of(metrics)).items() if k[0].startswith("flotilla_")}


def after(metrics, *happened):
    for event in happened:
        metrics.take(event)
    return of(metrics)


def test_before_training_nothing_is_taken_for_a_value(metrics):
    found = of(metrics)
    assert found["flotilla_global_step_target",] == 90
    assert ("flotilla_loss",) not in found
    assert ("flotilla_checkpoint_age_seconds",) not in found
    [info] = [key for key in found if key[0] == "flotilla_run_info"]
    assert {"digits-1", "digits", "async_parameter_server"} <= set(info)


def test_progress_validation_and_checkpoints_are_served(metrics, monkeypatch):
    monkeypatch.setattr("flotilla.trainer.telemetry.metrics.time.time", lambda: 2060.0)
    found = after(metrics, *EVENTS)
    # An older checkpoint that is found late changes nothing.
    metrics.set_checkpoint(20, 1000.0)
    assert of(metrics) == found
    assert found.items() >= {
        ("flotilla_global_step",): 40, ("flotilla_loss",): 0.5,
        ("flotilla_steps_per_second",): 20, ("flotilla_learning_rate",): 0.25,
        ("flotilla_remaining_seconds",): 2.5, ("flotilla_training_seconds",): 3,
        ("flotilla_progress_timestamp_seconds",): 1000, ("flotilla_attempt_examples",): 256,
        ("flotilla_strategy_metric", "staleness_mean"): 1.5,
        ("flotilla_validation_metric", "accuracy"): 0.875,
        ("flotilla_validation_global_step",): 40, ("flotilla_checkpoint_global_step",): 40,
        ("flotilla_checkpoint_timestamp_seconds",): 2000,
        ("flotilla_checkpoint_age_seconds",): 60,
        ("flotilla_checkpoint_pause_seconds_sum",): 0.125,
        ("flotilla_checkpoints_published_total",): 1,
        ("flotilla_checkpoint_upload_failures_total",): 1,
    }.items()  # fmt: skip
    assert ("flotilla_strategy_metric", "workers") not in found


def test_tasks_and_restarts_by_role(metrics):
    expected = {"worker": 2, "ps": 1, "chief": 1}
    metrics.tasks({"worker": 2, "ps": 1, "chief": 1}, expected, {})
    metrics.tasks({"worker": 1, "chief": 1}, expected, {"ps": 1, "worker": 2})
    metrics.tasks({"worker": 1, "chief": 1}, expected, {"ps": 1, "worker": 3})
    found = of(metrics)
    assert found["flotilla_tasks_expected", "worker"] == 2
    assert found["flotilla_tasks_alive", "worker"] == 1
    assert found["flotilla_tasks_alive", "ps"] == 0
    assert found["flotilla_restarts_total", "worker"] == 3
    assert found["flotilla_restarts_total", "chief"] == 0


def test_what_is_no_number_is_not_served(metrics):
    found = after(metrics, events.Validation(global_step=1, metrics={"loss": "much"}), PROGRESS)
    assert ("flotilla_validation_metric", "loss") not in found
    assert found["flotilla_loss",] == 0.5


def test_two_runs_of_one_process_share_nothing(metrics):
    other = RunMetrics(parse_config({}), "digits-2")
    metrics.take(PROGRESS)
    assert ("flotilla_loss",) not in of(other)
    assert "flotilla_" not in prometheus_client.generate_latest().decode()


def served_names(metrics):
    after(metrics, *EVENTS)
    metrics.tasks({"worker": 1}, {"worker": 1}, {"worker": 1})
    return {name for name, *_ in of(metrics)}


def test_names_keep_to_the_conventions(metrics):
    names = served_names(metrics)
    assert all(re.fullmatch("flotilla_[a-z_]+[a-z]", name) for name in names)
    text = text_of(metrics)
    kinds = dict(re.findall(r"# TYPE (\S+) (\w+)", text))
    assert all(name.endswith("_total") == (kind == "counter")
               for name, kind in kinds.items() if name.startswith("flotilla_")
               and not name.endswith("_created"))  # fmt: skip
    assert not [name for name in names if re.search("_(ms|minutes|hours|kb|mb)(_|$)", name)]
    documented = dict(re.findall(r"# HELP (flotilla_\S+) (.*)", text))
    assert all(documented.values())


def test_each_metric_that_an_alert_names_is_served(metrics):
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["spec"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == 3
    names = served_names(metrics)
    for rule in rules:
        named = set(re.findall(r"flotilla_\w+", rule["expr"] + str(rule["annotations"])))
        assert named
        assert named <= names, rule["alert"]


def test_the_page_names_exactly_what_is_served(metrics):
    rows = re.findall(r"^- `(flotilla_\w+)`:", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    names = {re.sub("_(sum|count)$", "", each) for each in served_names(metrics)}
    assert {name for name in names if not name.endswith("_created")} == set(rows)


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
        server = serve_registry(registry, port)
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


def test_an_address_may_be_named_and_in_a_pod_every_address_is_served(serving, monkeypatch):
    monkeypatch.setenv(METRICS_HOST, "127.0.0.2")
    assert scrape(serving().server_port, "127.0.0.2")
    monkeypatch.setenv(METRICS_HOST, EVERY_HOST)
    server = serving()
    hosts = ["127.0.0.1", "127.0.0.2"]
    if server.address_family == socket.AF_INET6:
        hosts.append("[::1]")
    for host in hosts:
        assert scrape(server.server_port, host) == {("flotilla_answer",): 42}


@pytest.mark.parametrize("host", ["", "*", "127.0.0.1", "::1", "a-host.example"])
def test_an_address_that_is_none_is_refused_before_anything_begins(monkeypatch, host):
    monkeypatch.setenv(METRICS_HOST, host)
    assert read_variable(METRICS_HOST) == host
    monkeypatch.setenv(METRICS_HOST, "a b")
    with pytest.raises(ConfigError, match="an address of this machine, or \\* for all"):
        check_variables()


@pytest.mark.parametrize("host", ["", "*"])
def test_a_port_that_is_taken_is_one_warning(tmp_path, monkeypatch, caplog, host):
    monkeypatch.setenv(METRICS_HOST, host)
    heard = []
    with socket.create_server(("", 0)) as holder, events.listen(heard.append):
        port = holder.getsockname()[1]
        with export_metrics(job_at(tmp_path, port), ALONE, CHIEF):
            pass
    [event] = [each for each in heard if isinstance(each, events.MetricsUnserved)]
    assert f":{port} (cluster.metrics_port): " in event.reason
    assert "Address already in use" in event.reason
    assert caplog.text.count("no metrics for Prometheus: ") == 1


def test_it_is_off_where_no_port_is_set(tmp_path, monkeypatch):
    monkeypatch.setattr("flotilla.trainer.telemetry.metrics.serve_registry", None)
    with export_metrics(job_at(tmp_path, 0), ALONE, CHIEF):
        assert not (tmp_path / "chief-0").exists()


def test_a_run_is_served_in_its_block_and_not_after_it(tmp_path, port):
    for _ in range(2):
        with export_metrics(job_at(tmp_path, port), ALONE, CHIEF):
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


SERVER, FIRST, SECOND = (
    Task(role="ps", index=0), Task(role="worker", index=0), Task(role="worker", index=1),
)  # fmt: skip
CLUSTER = Cluster(addresses={"chief": ("h:1",), "ps": ("h:2",), "worker": ("h:3", "h:4")})


class Reports:
    def __init__(self, folder):
        self.folder, self.last = folder, None

    def watch(self):
        def report(*counts):
            self.last = [dict(each) for each in counts]

        return TaskWatch(CLUSTER, CHIEF, self.folder, report)


@pytest.fixture
def reports(tmp_path):
    return Reports(tmp_path)


def test_those_that_are_gone_or_silent_are_not_alive(reports):
    reports.watch().note(Peers(gone=(SERVER,), silent=(FIRST,)))
    alive, expected, restarts = reports.last
    assert alive == {"chief": 1, "worker": 1}
    assert expected == {"chief": 1, "ps": 1, "worker": 2}
    assert restarts == {}


@pytest.mark.parametrize(
    ("rounds", "restarts"),
    [
        # The tasks have not started yet.
        ([Peers(gone=(SERVER, FIRST, SECOND)), Peers()], {}),
        ([Peers(gone=each) for each in [(), (FIRST,), (FIRST, SECOND), (), (FIRST,), ()]],
         {"worker": 3}),
        # A silent task may only be slow.
        ([Peers(), Peers(silent=(FIRST,)), Peers()], {}),
        ([Peers(), Peers(gone=(FIRST,)), Peers(silent=(FIRST,)), Peers()], {"worker": 1}),
    ],
)  # fmt: skip
def test_a_task_that_comes_back_has_begun_again_once(reports, rounds, restarts):
    watch = reports.watch()
    for peers in rounds:
        watch.note(peers)
    assert reports.last[2] == restarts


def started(folder, **counts):
    """Write how often the launcher has started each task, once by default."""
    for task in (CHIEF, SERVER, FIRST, SECOND):
        path = folder / str(task) / STARTS
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(counts.get(str(task).replace("-", "_"), 1)))


def test_a_task_that_is_back_before_it_is_asked_again_is_counted_by_its_launcher(tmp_path):
    reports = Reports(tmp_path / str(CHIEF))
    started(tmp_path)
    watch = reports.watch()
    watch.note(Peers())
    assert sum(reports.last[2].values()) == 0
    started(tmp_path, worker_1=3, chief_0=2)
    watch.note(Peers())
    # The watch never saw these tasks absent, but the launcher counted their restarts.
    assert {role: n for role, n in reports.last[2].items() if n} == {"worker": 2, "chief": 1}


def test_the_count_of_the_launcher_becomes_no_less(tmp_path, monkeypatch):
    reports = Reports(tmp_path / str(CHIEF))
    started(tmp_path, worker_1=3, chief_0=2)
    # The watch's own file counts no restarts.
    watch = reports.watch()
    begun(watch, monkeypatch)
    assert reports.last[2] == {"worker": 2, "chief": 1, "ps": 0}
    # The launcher is just rewriting this file.
    (tmp_path / str(SECOND) / STARTS).write_text("")
    watch.note(Peers())
    assert reports.last[2] == {"worker": 2, "chief": 1, "ps": 0}


@pytest.mark.parametrize("text", ["", "x", None])
def test_without_the_count_of_a_task_those_that_were_away_are_counted(tmp_path, text):
    reports = Reports(tmp_path / str(CHIEF))
    started(tmp_path, worker_1=3)
    path = tmp_path / str(FIRST) / STARTS
    path.unlink() if text is None else path.write_text(text)
    watch = reports.watch()
    for gone in [(), (FIRST,), ()]:
        watch.note(Peers(gone=gone))
    assert reports.last[2] == {"worker": 1}


def begun(watch, monkeypatch):
    monkeypatch.setattr(watch, "_watch", lambda: None)
    with watch.watching():
        pass


def test_the_next_attempt_of_the_same_launcher_counts_on(reports, monkeypatch):
    first = reports.watch()
    begun(first, monkeypatch)
    assert reports.last == [{"chief": 1}, {"chief": 1, "ps": 1, "worker": 2}, {}]
    for gone in [(), (FIRST,), (), (SERVER,)]:
        first.note(Peers(gone=gone))
    second = reports.watch()
    begun(second, monkeypatch)
    assert reports.last[2] == {"worker": 1, "chief": 1}
    # This task was absent when the previous attempt ended.
    second.note(Peers())
    assert reports.last[2] == {"worker": 1, "chief": 1, "ps": 1}


@pytest.mark.parametrize("text", ["{", "[]", '{"launcher": "1 2"}', '{"launcher": 3}', None])
def test_another_launcher_or_a_damaged_file_begins_at_zero(reports, monkeypatch, text):
    first = reports.watch()
    begun(first, monkeypatch)
    path = reports.folder / FILE
    if text is None:
        kept = json.loads(path.read_text())
        text = json.dumps({**kept, "launcher": "1 2"})
    path.write_text(text)
    begun(reports.watch(), monkeypatch)
    assert reports.last[2] == {}


def test_a_folder_that_takes_no_file_ends_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    reports = Reports(tmp_path / "file")
    begun(reports.watch(), monkeypatch)
    assert reports.last[2] == {}


def test_an_attempt_that_fails_looks_once_more(reports, monkeypatch):
    watch = reports.watch()
    watch.note(Peers())
    monkeypatch.setattr(watch, "_watch", lambda: None)
    monkeypatch.setattr(
        "flotilla.trainer.telemetry.metrics.probe_peers", lambda *_: Peers(gone=(SERVER,))
    )
    with pytest.raises(KeyError), watch.watching():
        raise KeyError
    assert reports.last[0] == {"chief": 1, "worker": 2}
    assert json.loads((reports.folder / FILE).read_text())["lost"] == ["ps-0"]
