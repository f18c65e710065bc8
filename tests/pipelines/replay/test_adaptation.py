"""What a step is given on this machine in place of a cluster, and what is said of it."""

import json

import pytest

from components.records.given import Given
from pipelines.replay import adaptation
from trainer.config.load import parse_config
from trainer.config.run_parameters import run_parameters
from trainer.errors import UserError
from trainer.promotion import lineage


def given(step="train_model", **more):
    return Given(step=step, began=1.0, **more)


def trained(*, debug=False, **sections):
    config = parse_config(sections).model_dump_json()
    arguments, remarks = adaptation.arguments_of(
        given(arguments={"config": config, "root": "s3://b/r"}), debug=debug
    )
    assert arguments["root"] == "s3://b/r"
    return parse_config(json.loads(arguments["config"])), remarks


def test_a_job_of_a_cluster_runs_as_processes_with_fewer_tasks(monkeypatch):
    monkeypatch.setattr(adaptation.cores, "usable", lambda: 4)
    monkeypatch.setattr(adaptation, "_has_gpus", lambda: False)
    config, remarks = trained(
        cluster={"launcher": "jobset", "workers": 8, "parameter_servers": 5, "gpus_per_worker": 2},
        training={"strategy": "sync_parameter_server", "replicas_to_aggregate": 6},
        data={"shards": 16},
    )
    # The configuration names its launcher still: what is checked before a job is checked here too.
    assert config.cluster.launcher == "jobset"
    assert (config.cluster.workers, config.cluster.parameter_servers) == (4, 2)
    assert config.training.replicas_to_aggregate == 4
    assert config.cluster.gpus_per_worker == 0
    assert remarks == [
        "training runs as processes of this machine, not as a job of Kubernetes",
        "no GPU is here, of 2 for each worker",
        "4 workers run here, of 8",
        "2 parameter servers run here, of 5",
    ]


def test_a_small_local_cluster_is_as_it_was():
    config, remarks = trained(cluster={"workers": 2})
    assert (config, remarks) == (parse_config({"cluster": {"workers": 2}}), [])


def test_a_debugger_needs_a_single_process():
    config, remarks = trained(debug=True)
    assert config.training.strategy == "single"
    assert remarks == [
        "for the debugger the strategy is single, in one process, not async_parameter_server"
    ]


def test_the_exit_step_ends_no_job_of_the_run():
    arguments, _ = adaptation.arguments_of(
        given("finish", arguments={"launcher": "tfjob"}), debug=False
    )
    assert arguments == {"launcher": "local"}


@pytest.mark.parametrize("is_other", [True, False])
def test_code_that_differs_is_said(tmp_path, monkeypatch, is_other):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "replayed_code.py").write_text("def model(): ...\n", encoding="utf-8")
    monkeypatch.setattr(lineage, "commit", lambda: "b" * 40)
    config = parse_config({"model": {"name": "replayed_code:model"}}).model_dump_json()
    record = given(
        arguments={"config": config},
        version="0.0.1" if is_other else adaptation.version("flotilla"),
        commit=("a" if is_other else "b") * 40,
        code={"replayed_code": "other"} if is_other else adaptation.digests(config),
    )
    said = adaptation.code_remark(record)
    assert bool(said) is is_other
    if is_other:
        assert said.startswith("the code differs: version ")
        assert "commit bbbbbbbbbbbb and not aaaaaaaaaaaa" in said
        assert said.endswith("module replayed_code was changed since")
        (tmp_path / "replayed_code.py").unlink()
        assert adaptation.code_remark(record).endswith("module replayed_code is not found here")


def test_what_a_run_of_another_version_was_not_given():
    values = {each.name: each.default for each in run_parameters()}
    adaptation.require_arguments(given("resolve_config", arguments=values))
    artifacts = {"artifact": {"uri": "s3://b/r", "tree": None}}
    names = ("config", "root", "run_id", "evaluation", "uri_path")
    gate = given("check_gate", arguments=dict.fromkeys(names, ""), artifacts=artifacts)
    adaptation.require_arguments(gate)
    del values["training_steps"]
    with pytest.raises(UserError, match=r"also takes training_steps, and the run was made by 0\.9"):
        adaptation.require_arguments(given("resolve_config", arguments=values, version="0.9"))
    with pytest.raises(UserError, match="also takes config, evaluation, root, run_id, uri_path"):
        adaptation.require_arguments(
            given("check_gate", arguments={}, artifacts=artifacts, version="0.9")
        )


def test_modules_of_a_bundle_are_not_looked_for_here():
    bundled = {"model": {"name": "no_such_module:model"}, "code": f"s3://bucket/r/code/{'a' * 64}"}
    assert adaptation.digests(parse_config(bundled).model_dump_json()) == {}
