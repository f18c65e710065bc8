"""Tests the first step: the configuration, its outputs for KFP, and the trial of the model."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kfp import dsl

from flotilla.components import prepare_data
from flotilla.components.records import run_store
from flotilla.components.records.record import Step
from flotilla.trainer import storage
from flotilla.trainer.cluster import fitting
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.config.form import FIELDS, to_form, to_local_form
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.promotion import training_data as trained
from flotilla.trainer.runtime.errors import ConfigError
from tests.components.called_steps import RUN, artifact_in, no_larger_files_than, refused
from tests.trainer.small_run import digits, publish_dataset


@pytest.fixture
def unchanged(tmp_path, monkeypatch):
    """Return the first step of a run whose data has not changed."""
    found = prepare_data.Prepared("{}", "gs://b/r", "digits-2", "", "unchanged")
    monkeypatch.setattr(prepare_data, "resolve_config", lambda _step: found)
    made = {name: artifact_in(tmp_path) for name in ("dataset", "validation", "page")}
    return Step(at="", published="", **made)


def test_where_nothing_is_new_every_output_has_a_file(unchanged, tmp_path):
    (tmp_path / "kfp").mkdir()
    prepared = prepare_data.work(unchanged)
    assert (prepared.Output, prepared.dataset_uri) == ("unchanged", "")
    made = (unchanged.dataset, unchanged.validation, unchanged.page)
    assert all(Path(each.path).stat().st_size for each in made)


def test_on_a_full_disk_it_is_one_line(unchanged, capsys):
    with no_larger_files_than(0):
        code, line = refused(prepare_data.work, unchanged, capsys=capsys)
    assert (code, "File too large; free some space" in line) == (1, True)


CONFIG = Config().model_dump_json()


@pytest.fixture
def step():
    """Return a step whose stages really run; an invalid configuration ends the process."""

    def stage(name, work):
        stages.append(name)
        try:
            work(None)
        except ConfigError as error:
            raise SystemExit(f"{error.exit_code}: {error}") from None

    stages: list[str] = []
    return SimpleNamespace(stage=stage, stages=stages)


def found(monkeypatch, mistake: str) -> None:
    def tried(*_):
        if mistake:
            raise ConfigError(mistake)
        return {}

    monkeypatch.setattr(fitting, "try_fit", tried)


def test_a_mistake_ends_a_preparation_that_goes_on(step, monkeypatch):
    found(monkeypatch, "gate.min: no such metric")
    # Setting the event replaces the signal that would end this process.
    monkeypatch.setattr(prepare_data.os, "kill", lambda *_: ended.set())
    ended = threading.Event()

    def prepare_for_hours():
        assert ended.wait(60)
        raise SystemExit(130)

    with (
        pytest.raises(SystemExit, match=r"2: gate\.min: no such metric"),
        prepare_data._try_model(step, CONFIG),
    ):
        prepare_for_hours()
    assert step.stages == ["resolve_config"]


def test_a_mistake_after_the_preparation_is_one_too(step, monkeypatch):
    def begin(_config, _dataset, on_mistake):
        mistake = ConfigError("gate.min: no such metric")
        return SimpleNamespace(join=lambda: on_mistake(mistake))

    monkeypatch.setattr(fitting, "begin", begin)
    monkeypatch.setattr(prepare_data.os, "kill", lambda *_: pytest.fail("nothing is to be ended"))
    with pytest.raises(SystemExit, match=r"2: gate\.min"), prepare_data._try_model(step, CONFIG):
        pass
    assert step.stages == ["resolve_config"]


def test_what_fits_is_prepared_and_an_interrupt_is_one(step, monkeypatch):
    found(monkeypatch, "")
    with prepare_data._try_model(step, CONFIG):
        pass
    with pytest.raises(SystemExit, match="130"), prepare_data._try_model(step, CONFIG):
        raise SystemExit(130)
    assert not step.stages


def test_on_this_machine_the_runner_tries_it(step, monkeypatch):
    monkeypatch.setenv(run_store.RUN_ID, "local")
    monkeypatch.setattr(fitting, "begin", lambda *_: pytest.fail("it is tried twice"))
    with prepare_data._try_model(step, CONFIG):
        pass


def resolve(values):
    """Return the first stage's result for these values, without its KFP component."""
    step = Step(at="", **{"published": "", **values})
    return step.stage("resolve_config", prepare_data.resolve_config)


def version_of(resolved):
    return Config.model_validate_json(resolved.config).data.version


@pytest.mark.usefixtures("emitted")
class TestResolveConfig:
    @pytest.fixture
    def values(self, tmp_path):
        given = {each.name: each.default for each in FIELDS}
        own = {"kfp_run_id": "123", "configuration": artifact_in(tmp_path), "is_whole_run": True}
        return {**given, "storage_root": "file:///r", **own}

    def test_it_passes_on_what_the_others_need(self, values):
        resolved = resolve({**values, "settings": {"data": {"seed": 5.0}}})
        config = Config.model_validate_json(resolved.config)
        assert config.data == DataConfig(seed=5)
        assert config.model_copy(update={"storage": Config().storage, "data": DataConfig()}) == (
            Config()
        )
        assert (resolved.root, resolved.run_id) == ("file:///r", "123")

    def test_the_command_line_names_the_run(self, values, monkeypatch):
        monkeypatch.setenv(run_store.RUN_ID, RUN)
        assert resolve(values).run_id == RUN

    def test_the_first_step_finds_the_root_itself(self, values, tmp_path, monkeypatch):
        # KFP stores local artifacts at a path below the working directory.
        monkeypatch.chdir(tmp_path)
        uri = storage.uri_of(tmp_path / "k/p/123/prepare-data/7/configuration")
        given = {**values, "storage_root": "", "configuration": dsl.Artifact(uri=uri)}
        resolved = resolve(given)
        assert resolved.root == storage.uri_of(tmp_path / "k/flotilla")

    @pytest.mark.parametrize(
        "case",
        [
            (2, {"steps": -5}, "training.steps: -5 is not allowed"),
            (
                2,
                {"settings": {"training": {"steps": 9.0}}},
                "settings: the field steps of the form sets training.steps",
            ),
            (1, {"storage_root": ""}, "storage.root is empty: set it to a URI"),
        ],
    )
    def test_a_wrong_value_is_the_users(self, values, capsys, emitted, case):
        expected, changed, begin = case
        code, line = refused(resolve, {**values, **changed}, capsys=capsys)
        assert (code, emitted()[-1].exit_code) == (expected, expected)
        assert line.startswith(begin)

    @pytest.mark.parametrize(
        ("changed", "begin"),
        [
            ({}, "storage.root: file:///r is a folder in this pod, which no other "),
            (
                {"storage_root": "gs://b/r", "source": "/in/*.csv"},
                "data.source: /in/*.csv is a path, but this pod does not have",
            ),
        ],
    )
    def test_a_path_is_refused_in_a_pod(self, values, monkeypatch, capsys, changed, begin):
        monkeypatch.setenv("KFP_POD_NAME", "prepare-data-1")
        monkeypatch.setattr(run_store, "run_at_first", lambda *_: "")
        code, line = refused(resolve, {**values, **changed}, capsys=capsys)
        assert code == 2
        assert line.startswith(begin)

    @pytest.mark.parametrize("form", [to_form, to_local_form])
    def test_it_takes_what_a_configuration_gives(self, values, form):
        tree = {"training": {"steps": 7, "patience": 3}, "storage": {"root": "file:///r"}}
        config = parse_config(tree)
        resolved = resolve({**values, **form(config)})
        assert Config.model_validate_json(resolved.config).training == config.training

    def test_where_nothing_is_new_the_word_is_unchanged(
        self, values, root, tmp_path, emitted, monkeypatch
    ):
        monkeypatch.delenv(run_store.RUN_FOLDER, raising=False)
        (tmp_path / "a.csv").write_text("a,b\n1,2\n")
        given = {**values, "storage_root": root, "source": str(tmp_path / "*.csv")}
        first = resolve(given)
        assert first.Output == "ready"
        trained.end(root, "123", "promoted")
        again = resolve({**given, "kfp_run_id": "124"})
        assert again.Output == "unchanged"
        assert version_of(again) == version_of(first)
        metrics = emitted()[-1].metrics
        assert metrics["decision"] == "unchanged"
        assert metrics["reasons"] == [
            "the files and the configuration are the same as in the finished run 123; to train "
            "again, set training.when_unchanged=train"
        ]
        part = {**given, "kfp_run_id": "125", "is_whole_run": False}
        assert resolve(part).Output == "ready"
        given["settings"] = {"training": {"when_unchanged": "train"}}
        assert resolve({**given, "kfp_run_id": "125"}).Output == "ready"
        (tmp_path / "b.csv").write_text("a,b\n1,2\n")
        assert version_of(resolve(given)) != version_of(first)


@pytest.mark.parametrize(
    ("task", "label", "found", "expected"),
    [
        ({}, ["churn"], {"": "yes"}, {"positive": "yes"}),
        ({"positive": "no"}, ["churn"], {"": "yes"}, {"positive": "no"}),
        ({"name": "classification"}, ["churn"], {"": "yes"}, {"name": "classification"}),
        ({"name": "ranking"}, [], {"": "yes"}, {"name": "ranking", "positive": "yes"}),
        ({}, [], {}, {}),
        # A setting of one output does not apply to the other outputs.
        ({}, ["a", "b"], {"": "yes"}, {}),
        ({}, ["a"], {"a": "yes"}, {}),
        (
            {"outputs": {"b": {"positive": "no", "weight": 2.0}}},
            ["a", "b"],
            {"a": "yes", "b": "yes"},
            {"outputs": {"a": {"positive": "yes"}, "b": {"positive": "no", "weight": 2.0}}},
        ),
    ],
)
def test_the_positive_class_is_the_champions_where_none_is_named(
    task, label, found, expected, monkeypatch
):
    monkeypatch.setattr(prepare_data, "champion_positive", lambda *_: found)
    tree: dict[str, Any] = {"task": task, "data": {"label": label}}
    made = prepare_data.add_positive(parse_config(tree), "file:///r")
    assert made == parse_config({**tree, "task": expected})


@pytest.mark.parametrize(
    ("started", "args", "expected"),
    [
        ("auto", {}, ("mlp", False)),
        ("mlp", {}, ("cnn", True)),
        # An earlier version, which augmented no images, chose this model.
        ("auto", {"filters": [2]}, ("cnn", False)),
    ],
)
def test_a_resumed_run_keeps_the_model_that_was_chosen(
    tmp_path, monkeypatch, started, args, expected
):
    dataset = publish_dataset(tmp_path / "dataset", digits())
    config = parse_config({"model": {"name": "auto", "args": args}})
    monkeypatch.setenv(run_store.RUN_FOLDER, str(tmp_path))
    fresh = prepare_data.add_choices(config, dataset, "", RUN).model
    assert (fresh.name, fresh.args["augment"]) == ("cnn", True)
    before = expected[0] if started == "auto" else "mlp"
    first, then = (
        parse_config({"model": {"name": name, "args": args}}) for name in (started, before)
    )
    (tmp_path / run_store.CONFIG).write_text(first.model_dump_json())
    given = run_store.record_call("train_model", {"config": then.model_dump_json()})
    run_store.write_given(given, "")
    found = prepare_data.add_choices(config, dataset, "", RUN).model
    assert (found.name, "augment" in found.args) == expected
    assert found.args.get("filters") == args.get("filters")
