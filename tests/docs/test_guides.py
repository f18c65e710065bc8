"""The configurations and the code in the guides work on a user's files."""

import ast
import csv
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
import yaml
from PIL import Image
from sklearn.datasets import load_iris
from sklearn.metrics import mean_pinball_loss

from flotilla.pipelines.compile import compile_components
from flotilla.trainer import storage
from flotilla.trainer.config.load import load_config
from flotilla.trainer.config.schema import STRATEGIES
from flotilla.trainer.events import StepEnd, WarmStart
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.models import tabular
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.report.heading import programs
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.training import dry_run
from flotilla.trainer.training.task_contract import require_task
from tests.conftest import ROOT
from tests.docs.markdown import read
from tests.pipelines.called import call
from tests.trainer import small_run
from tests.trainer.tasks.measuring import InParts, measured, target

GUIDE = read(ROOT / "docs" / "how-to" / "files.md", ROOT)
CONFIGS = {yaml.safe_load(block.text)["name"]: block.text for block in GUIDE.of("yaml")}
ROWS = 1500


def write_people(folder):
    random = np.random.default_rng(1)
    with (folder / "people.csv").open("w", newline="") as lines:
        rows = csv.writer(lines)
        rows.writerow(["age", "city", "review", "bought"])
        for _ in range(ROWS):
            good = random.random() < 0.5
            said = random.choice(["Great,\nwould buy again!", "good: “works”"] if good else
                                 ["bad quality; broke", "awful, does not work"])  # fmt: skip
            review = f"{said} {random.integers(1000)} days"
            city = random.choice(["Rome", "Köln", "São Paulo"])
            age = "" if random.random() < 0.05 else f"{random.normal(40, 12):.1f}"
            chance = 0.95 if good and city != "Rome" else 0.05
            rows.writerow([age, city, review, "yes" if random.random() < chance else "no"])


def write_ratings(folder):
    random = np.random.default_rng(4)
    users, films = random.normal(size=(40, 3)), random.normal(size=(30, 3))
    with (folder / "ratings.csv").open("w", newline="") as lines:
        rows = csv.writer(lines)
        rows.writerow(["user", "film", "rating"])
        for _ in range(ROWS):
            user, film = random.integers(40), random.integers(30)
            score = users[user] @ films[film]
            rows.writerow([f"u{user}", int(film), int(np.clip(np.rint(3 + score), 1, 5))])


def write_houses(folder):
    random = np.random.default_rng(2)
    with (folder / "houses.csv").open("w", newline="") as lines:
        rows = csv.writer(lines)
        rows.writerow(["id", "built", "area", "town", "price"])
        for number in range(ROWS):
            area, built = random.uniform(30, 300), int(random.integers(1900, 2020))
            town = random.choice(["A", "B", "C"])
            price = area * (2000 if town == "A" else 1000) + (built - 1900) * 300
            rows.writerow([number, built, f"{area:.1f}", town, round(price)])


def write_photos(folder):
    random = np.random.default_rng(3)
    for name, colour in (("red", (200, 30, 30)), ("green", (30, 200, 30))):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(250):
            height, width = random.integers(20, 60, 2)
            pixels = np.clip(np.array(colour) + random.normal(0, 50, (height, width, 3)), 0, 255)
            form = "png" if number % 2 else "jpg"
            Image.fromarray(pixels.astype(np.uint8)).save(
                folder / "photos" / name / f"{number}.{form}"
            )


def ran(folder, name, *settings):
    (folder / f"{name}.yaml").write_text(CONFIGS[name])
    words = [word for each in settings for word in ("--set", each)]
    return call("run", folder / "runs", f"{name}.yaml", *words, cwd=folder)


def test_they_are_short():
    assert CONFIGS.keys() == {"people", "houses", "photos", "ratings"}
    assert all(len(text.strip().splitlines()) <= 15 for text in CONFIGS.values())


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "write"),
    [
        # This guide is also run below, so only long tests run it here.
        pytest.param("people", write_people, marks=pytest.mark.long),
        ("houses", write_houses),
        ("ratings", write_ratings),
        pytest.param("photos", write_photos, marks=pytest.mark.long),
    ],
)
def test_files_become_a_blessed_model(tmp_path, name, write):
    write(tmp_path)
    ended = ran(tmp_path, name)
    assert ended.code == 0, ended.err
    assert ended.answer["status"] == "blessed"


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_data_in_another_unit_are_refused_before_training(tmp_path):
    write_people(tmp_path)
    assert ran(tmp_path, "people", "training.steps=100").code == 0
    path = tmp_path / "people.csv"
    with path.open(newline="") as file:
        table = list(csv.reader(file))
    for row in table[1:]:
        row[0] = row[0] and str(1000 * float(row[0]))
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(table)
    ended = ran(tmp_path, "people")
    assert (ended.code, ended.answer["status"]) == (3, "refused")
    assert (
        "unit: the values of 'age' are those of the champion's dataset times 1000"
        in ended.answer["message"]
    )
    assert "train_model" not in ended.statuses()


def test_the_model_of_the_guide_takes_raw_values():
    _, block, *_ = read(ROOT / "docs" / "how-to" / "own-model.md", ROOT).of("python")
    made = {}
    exec(block.text, made)
    columns = {
        "age": FeatureSpec(shape=(), dtype="float32", stored="float"),
        "review": FeatureSpec(shape=(), dtype="string", stored="bytes"),
    }
    model = made["reviews"](InputSpec.of(columns, ["age", "review"], (2,)), words=3)
    given = {"age": tf.constant([3.0]), "review": tf.constant(["not bad"])}
    assert model(given).shape == (1, 2)


# Configurations with parameter servers run above and in the cluster tests.
@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_exports_what_was_learnt(tmp_path, strategy):
    write_people(tmp_path)
    ended = ran(tmp_path, "people", f"training.strategy={strategy}", "training.steps=200")
    assert ended.code == 0, ended.err
    model = ended.path_of("model")
    manifest = storage.read_manifest(storage.uri_of(model))
    loaded = tf.saved_model.load(model / manifest.fields["saved_model"])
    inputs = {
        "age": tf.constant([40.0, np.nan]),
        "city": tf.constant(["Köln", "a town that nobody knows"]),
        "review": tf.constant(["Great,\nwould buy again! 7 days", ""]),
    }
    answers = loaded.signatures["serving_default"](**inputs)
    # The import of `tabular` registers its layers. Without them, Keras cannot load the model.
    assert tabular
    own = keras.saving.load_model(model / "model.keras")
    expected = tf.sigmoid(own(inputs)).numpy().ravel()
    np.testing.assert_allclose(answers["probability"].numpy().ravel(), expected, atol=1e-5)
    assert expected[0] > 0.5


GUIDES = ROOT / "docs" / "how-to"
MODULES = {"own-dataset": "flowers", "own-model": "blocks", "custom-strategy": "turns"}


def guide(name):
    return read(GUIDES / f"{name}.md", ROOT)


@pytest.fixture
def folder(tmp_path):
    """Create a user's folder with the files of three guides and the table of the first guide."""
    for name, module in MODULES.items():
        block, *_ = guide(name).of("python")
        assert f"`{module}.py`" in guide(name).prose
        (tmp_path / f"{module}.py").write_text(block.text)
    configuration, *_ = guide("own-dataset").of("yaml")
    (tmp_path / "flowers.yaml").write_text(configuration.text)
    (tmp_path / "data").mkdir()
    source = load_iris()
    with (tmp_path / "data" / "flowers.csv").open("w") as lines:
        rows = zip(source.data.tolist(), source.target, strict=True)
        names = source.target_names
        csv.writer(lines).writerows([*row, names[species]] for row, species in rows)
    return tmp_path


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_own_dataset_model_and_strategy_make_a_blessed_model(folder):
    chosen = ["model.name=blocks:residual", "training.strategy=turns:TakingTurns"]
    settings = [word for each in chosen for word in ("--set", each)]
    ended = call("run", folder / "runs", "flowers.yaml", *settings, cwd=folder)
    assert ended.code == 0, ended.err
    assert ended.answer["status"] == "blessed"
    assert ended.answer["global_step"] == 400
    assert ended.answer["metrics"]["accuracy"] >= 0.9
    published = ended.events(StepEnd)[1].metrics
    counts = re.search(r"(\d+) for training, (\d+) to validate, (\d+) to test", text("own-dataset"))
    assert [published[split] for split in ("train", "validation", "test")] == [
        int(number) for number in counts.groups()
    ]


@pytest.fixture
def fine_tuned(tmp_path):
    """Create a user's folder with the files and the pretrained model of the fine-tuning guide."""
    (block,), (configuration,) = guide("fine-tuning").of("python"), guide("fine-tuning").of("yaml")
    (tmp_path / "photographs.py").write_text(block.text)
    (tmp_path / "fine-tuned.yaml").write_text(configuration.text)
    python = [sys.executable, "photographs.py"]
    subprocess.run(python, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    return tmp_path


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_a_pretrained_trunk_is_fine_tuned(fine_tuned):
    settings = ["--set", "training.strategy=single", "--set", "training.steps=100"]
    ended = call("train", fine_tuned / "runs", "fine-tuned.yaml", *settings, cwd=fine_tuned)
    assert ended.code == 0, ended.err
    assert {"global_step", "handed_on_step"} <= ended.answer.keys()
    (begun,) = ended.events(WarmStart)
    lines = " ".join(text("fine-tuning").split())
    assert begun.what in lines
    assert storage.local_path(begun.uri) == fine_tuned / "pretrained.keras"
    (step,) = [each for each in ended.events(StepEnd) if each.step == "train_model"]
    assert step.metrics["warm_start"] == begun.what
    pretrained = keras.saving.load_model(fine_tuned / "pretrained.keras")
    uri = ended.answer["artifacts"]["checkpoint"]
    trained = values(uri)
    for variable in pretrained.variables:
        if variable.path.startswith("edges"):
            key = f"model/{variable.path}"
            np.testing.assert_array_equal(trained[key], variable.numpy(), err_msg=key)
    assert (trained["model/shapes/kernel"] != pretrained.get_layer("shapes").kernel.numpy()).any()


def values(uri):
    reader = tf.train.load_checkpoint(str(storage.local_path(uri) / "variables"))
    return {
        key.removeprefix("variables/").partition("/")[0].replace(".S", "/"): reader.get_tensor(key)
        for key in reader.get_variable_to_shape_map()
        if key.startswith("variables/")
    }


def text(name):
    return (GUIDES / f"{name}.md").read_text(encoding="utf-8")


def test_a_pipeline_of_ones_own_is_compiled_from_a_component(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compile_components(tmp_path / "build" / "components")
    (block,) = guide("reuse-components").of("python")
    exec(compile(block.text, "guide", "exec", dont_inherit=True), {"__name__": "guide"})
    compiled = (tmp_path / "measure-again.yaml").read_text(encoding="utf-8")
    assert "evaluate-model" in compiled
    assert os.listdir(tmp_path / "build" / "components")


PAGE = read(ROOT / "docs" / "how-to" / "own-task.md", ROOT)
(CODE,), (CONFIGURATION,) = PAGE.of("python"), PAGE.of("yaml")
QUANTILES = (0.1, 0.5, 0.9)
RANDOM = np.random.default_rng(0)
LABELS = RANDOM.normal(150, 80, 60).astype("float32")


@pytest.fixture
def task_folder(tmp_path, monkeypatch):
    (tmp_path / "quantiles.py").write_text(CODE.text)
    (tmp_path / "quantiles.yaml").write_text(CONFIGURATION.text)
    monkeypatch.setenv(user_code.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "quantiles", raising=False)
    return tmp_path


@pytest.fixture
def module(task_folder, monkeypatch):
    monkeypatch.syspath_prepend(task_folder)
    return importlib.import_module("quantiles")


def test_it_is_one_file_of_at_most_150_lines():
    assert len(CODE.text.splitlines()) <= 150


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_it_keeps_to_the_contract(module, dtype):
    task = module.Quantiles(target(LABELS.astype(dtype)))
    assert (task.name, task.output_shape) == ("quantiles", (3,))
    require_task(task, {})


@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_are_those_of_scikit_learn(module, weighted):
    task = module.Quantiles(target(LABELS))
    outputs = RANDOM.normal(size=(len(LABELS), 3)).astype("float32")
    weights = RANDOM.uniform(size=len(LABELS)).astype("float32") if weighted else None
    found = measured(task, InParts(LABELS, outputs, weights))
    low, middle, high = np.sort(outputs * LABELS.std() + LABELS.mean(), axis=1).T
    costs = [
        mean_pinball_loss(LABELS, each, alpha=q, sample_weight=weights)
        for q, each in zip(QUANTILES, (low, middle, high), strict=True)
    ]
    inside = (low <= LABELS) & (high >= LABELS)
    assert found == pytest.approx(
        {
            # Like all Keras losses, the pinball loss is divided by the number of examples, not by
            # the sum of weights.
            "loss": np.mean(costs) / LABELS.std() * (1 if weights is None else weights.mean()),
            "pinball": np.mean(costs),
            "coverage": np.average(inside, weights=weights),
            "interval_width": np.average(high - low, weights=weights),
        },
        rel=1e-4,
    )


@pytest.mark.parametrize(
    ("dtype", "quantiles", "words"),
    [
        ("bool", QUANTILES, "it needs one number per example, not 'label' (one bool)"),
        ("float32", [0.9, 0.1], "quantiles: [0.9, 0.1] must be increasing, and between 0 and 1"),
        ("float32", [0, 0.5], "quantiles: [0, 0.5] must be increasing, and between 0 and 1"),
    ],
)
def test_what_it_does_not_take_is_refused(module, dtype, quantiles, words):
    with pytest.raises(ConfigError) as caught:
        module.Quantiles(target(LABELS.astype(dtype)), quantiles=quantiles)
    assert str(caught.value) == words


def fitted(task_folder):
    """Do a dry run of the page's configuration, without preparing its dataset."""
    return dry_run.fit(load_config(task_folder / "quantiles.yaml"), task_folder / "scratch")


def test_a_dry_run_takes_it(task_folder):
    assert fitted(task_folder).task == "quantiles"


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("tf.maximum(q * missed", "tf.maximum(q * missing", "name 'missing' is not defined"),
        ("    def answers(", "    def answer(", "does not define answers"),
        (
            '"pinball": "lower"',
            '"pinball": "less"',
            "the direction of 'pinball' is 'less'; it must be",
        ),
        ("len(self.quantiles),)", "2,)", "failed: "),
        ("float(label)", "label", "described() must be plain data"),
    ],
)
def test_a_mistake_in_it_is_one_line(task_folder, right, wrong, words):
    assert right in CODE.text
    (task_folder / "quantiles.py").write_text(CODE.text.replace(right, wrong))
    with pytest.raises(ConfigError) as caught:
        fitted(task_folder)
    assert str(caught.value).startswith("task quantiles:Quantiles")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def evaluation(ended):
    uri = ended.answer["artifacts"]["evaluation"]
    return json.loads((storage.local_path(uri) / "metrics.json").read_text(encoding="utf-8"))


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_a_second_run_is_compared_with_the_first(task_folder):
    first, second = (
        call(
            "run",
            task_folder / "runs",
            "quantiles.yaml",
            "--set",
            f"training.seed={seed}",
            cwd=task_folder,
        )
        for seed in (0, 1)
    )
    for ended in (first, second):
        assert (ended.code, ended.answer["status"]) == (0, "blessed"), ended.err
        found = evaluation(ended)
        assert ended.answer["metrics"] == found["metrics"]
        assert found["metrics"].keys() == {"loss", "pinball", "coverage", "interval_width"}
        assert [row["examples"] for row in found["slices"]["progression"]] == [22, 22, 22, 22]
        model = storage.local_path(ended.answer["artifacts"]["model"])
        parity = json.loads((model / "parity.json").read_text(encoding="utf-8"))
        assert parity["formats"].keys() == {"saved_model", "keras", "tflite"}
        card = (model / "model_card.md").read_text(encoding="utf-8")
        assert "| `q10` | float32 | (n) |" in card
        assert "### Labels below each quantile" in card
    champion = found["champion"]
    assert champion["metrics"]["pinball"] == pytest.approx(
        first.answer["metrics"]["pinball"], rel=1e-4
    )
    assert (champion["paired"]["metric"], champion["paired"]["better"]) == ("pinball", "lower")
    (report,) = (storage.local_path(second.answer["artifacts"]["report"]),)
    assert "the champion" in report.read_text(encoding="utf-8")


PROGRAMS = [
    block.text for block in read(ROOT / "docs" / "how-to" / "use-a-model.md", ROOT).of("python")
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    run = small_run.small_run(tmp_path_factory.mktemp("run"))
    run = small_run.with_formats(run, "saved_model", "keras", "tflite")
    decision = small_run.decide(run, run.root, accuracy=0.5)
    output = storage.uri_of(run.root / "model")
    small_run.export_model(run, decision, output, run.root / "scratch")
    return run, storage.local_path(output)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_each_program_runs_unchanged(exported, tmp_path):
    run, folder = exported
    assert len(PROGRAMS) == 3
    asked = json.loads((folder / "request.json").read_text())["instances"]
    images = np.array([each["image"] for each in asked], np.uint8)
    logits = dataclasses.replace(run, images=images).logits
    expected = [str(place) for place in np.argmax(logits, axis=-1)]
    settings = {**os.environ, "PYTHONSAFEPATH": "1"}
    made = programs("models/digits/1", storage.read_manifest(storage.uri_of(folder)).fields)
    assert PROGRAMS[:2] == [made["Keras"], made["SavedModel"]]
    (tmp_path / "models" / "digits").mkdir(parents=True)
    (tmp_path / "models" / "digits" / "1").symlink_to(folder)
    chosen = (
        "\nanswers = answers if keras else answers['probabilities']"
        "\nprint([str(each) for each in np.argmax(answers, axis=-1)])"
    )
    for number, program in enumerate(PROGRAMS):
        path = tmp_path / f"program{number}.py"
        more = chosen.replace("if keras", f"if {number == 0}") if number < len(made) else ""
        path.write_text(program + more)
        ended = subprocess.run(
            [sys.executable, path, folder], cwd=tmp_path, env=settings,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        assert ast.literal_eval(ended.stdout.splitlines()[-1]) == expected
