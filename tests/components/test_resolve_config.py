"""The first step: run parameters in, and the checked configuration for the other steps out."""

from typing import Any

import pytest
import tensorflow_datasets as tfds
from kfp import dsl
from trainer.config.run_parameters import run_parameters, to_parameters

from components import resolve_config
from components.records import run_store
from tests.components.called_steps import RUN, artifact_in, refused
from trainer import storage
from trainer.cluster import fitting
from trainer.config.data import DataConfig
from trainer.config.load import parse_config
from trainer.config.schema import Config
from trainer.data.embedded.scikit import Digits
from trainer.data.prepare import dataset_key
from trainer.errors import ConfigError
from trainer.promotion import trained

pytestmark = pytest.mark.usefixtures("emitted")


class TestResolveConfig:
    @pytest.fixture
    def values(self, tmp_path):
        given = {parameter.name: parameter.default for parameter in run_parameters()}
        own = {"kfp_run_id": "123", "configuration": artifact_in(tmp_path)}
        return {**given, "storage_root": "file:///r", **own}

    def test_it_passes_on_what_the_others_need(self, values):
        resolved = resolve_config.run_step({**values, "data_seed": 5})
        config = Config.model_validate_json(resolved.config)
        assert config.data == DataConfig(seed=5)
        assert config.model_copy(update={"storage": Config().storage, "data": DataConfig()}) == (
            Config()
        )
        # What preparing depends on names the version: KFP reuses by it.
        data = DataConfig.model_validate_json(resolved.data)
        assert data == DataConfig(seed=5, version="1.0.0")
        assert (resolved.root, resolved.run_id) == ("file:///r", "123")

    def test_what_does_not_fit_is_refused_before_any_other_pod(self, values, monkeypatch, capsys):
        def refuse(*_):
            raise ConfigError("model mlp: it does not fit")

        monkeypatch.setattr(fitting, "tried", refuse)
        assert refused(resolve_config.run_step, values, capsys=capsys) == (
            2,
            "model mlp: it does not fit",
        )

    def test_what_is_not_known_in_time_is_no_refusal(self, values, monkeypatch, caplog):
        def wait(*_):
            raise fitting.NotKnownError("the model was not built in 90 s")

        monkeypatch.setattr(fitting, "tried", wait)
        resolve_config.run_step(values)
        assert "whether model and dataset fit is not known: the model was not" in caplog.text

    def test_the_version_that_is_prepared_is_tried(self, values, fits):
        resolve_config.run_step(values)
        assert [config.data.version for config in fits] == ["1.0.0"]

    def test_on_this_machine_the_chief_finds_it(self, values, fits, monkeypatch):
        monkeypatch.setenv(run_store.RUN_ID, "local")
        resolve_config.run_step(values)
        assert not fits

    def test_what_another_section_says_does_not_change_the_data(self, values):
        first = resolve_config.run_step(values)
        second = resolve_config.run_step({**values, "training_steps": 7, "kfp_run_id": "124"})
        assert first.data == second.data
        assert first.config != second.config

    def test_the_cache_is_not_asked_for_a_dataset_that_is_not_there(self, values, root):
        given = {**values, "storage_root": root}
        assert resolve_config.run_step(given).seal == "123"
        assert resolve_config.run_step({**given, "kfp_run_id": "124"}).seal == "124"

    def test_a_root_that_the_other_pods_do_not_see_is_refused(self, values, monkeypatch, capsys):
        monkeypatch.setenv("KFP_POD_NAME", "resolve-config-1")
        code, line = refused(resolve_config.run_step, values, capsys=capsys)
        assert code == 2
        assert line.startswith("storage.root: file:///r is a folder of this pod, which no other ")

    @pytest.fixture
    def dataset(self, root, run, tmp_path):
        """Publish the dataset of the default configuration; return its URI."""
        version = storage.read_manifest(run.dataset).fields["version"]
        storage.fetch(run.dataset, tmp_path / "dataset")
        uri = storage.join(root, "datasets", dataset_key(DataConfig(), {"version": version}))
        fields = {"identity": {"version": version}}
        storage.publish(tmp_path / "dataset", uri, kind="dataset", fields=fields)
        return uri

    def test_it_is_asked_for_one_that_is(self, values, root, dataset):
        given = {**values, "storage_root": root}
        first = resolve_config.run_step(given).seal
        assert storage.name_of(dataset) in first
        assert resolve_config.run_step({**given, "kfp_run_id": "124"}).seal == first
        storage.delete(dataset)
        assert resolve_config.run_step({**given, "kfp_run_id": "125"}).seal == "125"

    @pytest.mark.usefixtures("dataset")
    def test_it_is_not_asked_for_the_artifact_of_another_pipeline_root(
        self, values, root, tmp_path, monkeypatch
    ):
        monkeypatch.chdir(tmp_path)

        def seal(pipeline_root, run_id):
            uri = f"file://{pipeline_root}/pipeline/{run_id}/resolve-config/7/configuration"
            own = {"kfp_run_id": run_id, "configuration": dsl.Artifact(uri=uri)}
            return resolve_config.run_step({**values, "storage_root": root, **own}).seal

        assert seal("here", "124") == seal("here", "125") != seal("there", "126")

    def test_a_newer_version_is_other_data_for_the_cache(self, values, monkeypatch, emitted):
        before = resolve_config.run_step(values).data
        assert emitted()[-1].metrics["data_version"] == "1.0.0"
        monkeypatch.setattr(Digits, "VERSION", tfds.core.Version("1.1.0"))
        after = resolve_config.run_step(values).data
        assert after == before.replace("1.0.0", "1.1.0") != before

    def test_on_this_machine_preparing_finds_the_version(self, values, monkeypatch):
        monkeypatch.setenv(run_store.RUN_ID, RUN)
        unknown = {**values, "data_dataset": "no.such:Builder"}
        data = resolve_config.run_step(unknown).data
        assert DataConfig.model_validate_json(data) == DataConfig(dataset="no.such:Builder")

    def test_a_dataset_that_does_not_exist_is_refused_at_once_on_a_cluster(self, values, capsys):
        code, line = refused(
            resolve_config.run_step, {**values, "data_dataset": "mnits"}, capsys=capsys
        )
        assert code == 2
        assert line.startswith("data.dataset: there is no dataset 'mnits' in TFDS")

    def test_the_command_line_names_the_run(self, values, monkeypatch):
        monkeypatch.setenv(run_store.RUN_ID, RUN)
        assert resolve_config.run_step(values).run_id == RUN

    def test_without_a_root_nothing_can_be_published(self, values, capsys):
        code, line = refused(resolve_config.run_step, {**values, "storage_root": ""}, capsys=capsys)
        assert code == 1
        assert line.startswith("storage.root is empty: set it to the URI")

    @pytest.mark.parametrize(
        ("output", "root"),
        [
            ("gs://b/k/p/123/resolve-config/7/configuration", "gs://b/k/flotilla"),
            (
                "minio://mlpipeline/v2/p/123/resolve-config/7/configuration?endpoint=a:1&region=x",
                "minio://mlpipeline/v2/flotilla?endpoint=a:1&region=x",
            ),
        ],
    )
    def test_without_a_root_it_is_below_the_pipeline_root(self, values, output, root):
        # Without a request to the store of a real bucket.
        assert run_store.root_of("", output, values["kfp_run_id"]) == root

    def test_the_first_step_finds_the_root_itself(self, values, tmp_path, monkeypatch):
        # To KFP, a URI of a file is a path like any other.
        monkeypatch.chdir(tmp_path)
        uri = storage.uri_of(tmp_path / "k/p/123/resolve-config/7/configuration")
        given = {**values, "storage_root": "", "configuration": dsl.Artifact(uri=uri)}
        resolved = resolve_config.run_step(given)
        assert resolved.root == storage.uri_of(tmp_path / "k/flotilla")

    def test_a_wrong_value_is_the_users(self, values, capsys, emitted):
        wrong = {**values, "training_steps": 0}
        code, line = refused(resolve_config.run_step, wrong, capsys=capsys)
        assert code == 2
        assert line.startswith("training.steps: 0 is not allowed")
        assert emitted()[-1].exit_code == 2

    def test_what_is_no_json_is_the_users(self, values, capsys):
        wrong = {**values, "model_args": "{hidden"}
        code, line = refused(resolve_config.run_step, wrong, capsys=capsys)
        assert code == 2
        assert "model.args" in line

    def test_it_takes_what_a_configuration_gives(self, values):
        config = Config()
        resolved = resolve_config.run_step(
            {**values, **to_parameters(config), "storage_root": "file:///r"}
        )
        assert Config.model_validate_json(resolved.config).training == config.training

    def test_where_nothing_is_new_the_word_is_unchanged(
        self, values, root, tmp_path, emitted, monkeypatch
    ):
        monkeypatch.delenv(run_store.RUN_FOLDER, raising=False)
        (tmp_path / "a.csv").write_text("a,b\n1,2\n")
        given = {**values, "storage_root": root, "data_source": str(tmp_path / "*.csv")}
        first = resolve_config.run_step(given)
        assert first.Output == "new"
        trained.end(root, "123", "promoted")
        again = resolve_config.run_step({**given, "kfp_run_id": "124"})
        assert (again.Output, again.data) == ("unchanged", first.data)
        metrics = emitted()[-1].metrics
        assert metrics["decision"] == "unchanged"
        assert metrics["reasons"] == [
            "files and configuration are those of 123, which has finished"
        ]
        given["training_when_unchanged"] = "train"
        assert resolve_config.run_step({**given, "kfp_run_id": "125"}).Output == "new"
        (tmp_path / "b.csv").write_text("a,b\n1,2\n")
        assert resolve_config.run_step({**values, **given}).data != first.data

    def test_a_path_is_refused_in_a_pod(self, values, monkeypatch, capsys):
        monkeypatch.setenv("KFP_POD_NAME", "resolve-config-1")
        given = {**values, "storage_root": "gs://b/r", "data_source": "in/*.csv"}
        monkeypatch.setattr(run_store, "run_at_first", lambda *_: "")
        code, line = refused(resolve_config.run_step, given, capsys=capsys)
        assert code == 2
        assert line.startswith("data.source: in/*.csv is a path, and there are no files of yours")


@pytest.mark.parametrize(
    ("task", "label", "found", "expected"),
    [
        ({}, ["churn"], {"": "yes"}, {"positive": "yes"}),
        ({"positive": "no"}, ["churn"], {"": "yes"}, {"positive": "no"}),
        ({"name": "classification"}, ["churn"], {"": "yes"}, {"name": "classification"}),
        ({"name": "ranking"}, [], {"": "yes"}, {"name": "ranking", "positive": "yes"}),
        ({}, [], {}, {}),
        # What is of one output is of no other.
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
    monkeypatch.setattr(resolve_config, "champion_positive", lambda *_: found)
    tree: dict[str, Any] = {"task": task, "data": {"label": label}}
    made = resolve_config.with_positive(parse_config(tree), "file:///r")
    assert made == parse_config({**tree, "task": expected})
