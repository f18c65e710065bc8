"""Tests runs with a warm start: the first starts from scratch, the next from its model."""

import base64
import json
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import numpy as np
import pytest

from flotilla.components import evaluate_model
from flotilla.components.records import run_store
from flotilla.pipelines import models
from flotilla.pipelines.cli import app
from flotilla.pipelines.runs import local
from flotilla.trainer import events, signing, storage
from flotilla.trainer.config.load import load_config
from flotilla.trainer.config.thresholds import ChampionRule
from flotilla.trainer.data.read import evaluation_batches, stage_shards
from flotilla.trainer.evaluation.evaluate import load_trained_model
from flotilla.trainer.events import AttemptBegin, Progress, StepEnd, WarmStart
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.promotion import registry
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage.local import locked
from flotilla.trainer.storage.manifest import checksum
from flotilla.trainer.tasks.registry import make_objective
from tests.components.called_steps import artifact_in, to_evaluate
from tests.conftest import ROOT
from tests.pipelines.called import call, calling, processes_of, setting
from tests.planted import SECRETS, found_in, plant
from tests.stores.faults import Fault
from tests.stores.fixtures import bucket_name
from tests.stores.link import link
from tests.trainer.signing.test_signing import key_pair
from tests.trainer.small_run import publish_checkpoint

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1200)]

FEW = setting(training__checkpoint_every=100, gate__min__accuracy=0.5, evaluation__baseline="none")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("champion") / "runs"


@pytest.fixture(scope="module")
def first(workdir):
    """Run with a warm start from a champion that does not exist yet; the model becomes champion."""
    steps = setting(training__steps=600, training__warm_start="champion")
    called = call("run", workdir, *FEW, *steps, cwd=workdir.parent)
    assert called.code == 0, called.err + called.log
    return called


@pytest.fixture(scope="module")
def second(workdir, first):
    assert first.answer["status"] == "blessed"
    steps = setting(
        training__steps=60, training__warm_start="champion", training__validate_every=20,
        training__optimizer__learning_rate=0.0005,
    )  # fmt: skip
    called = call("run", workdir, *FEW, *steps, cwd=workdir.parent)
    assert called.code == 0, called.err + called.log
    return called


def test_the_first_run_begins_from_scratch_and_the_second_at_the_champions_loss(first, second):
    root = storage.uri_of(first.workdir)
    line = f"training begins from scratch: digits has no champion yet below {root}"
    assert first.err.splitlines().count(line) == 1
    rows = [e for e in second.events(Progress) if e.global_step <= 20]
    champion, cold = first.answer["metrics"]["loss"], first.events(Progress)[0]
    assert champion < 0.5 < cold.loss
    assert rows
    assert all(row.loss < champion + 0.15 for row in rows)
    uri = first.answer["artifacts"]["checkpoint"]
    line = f"training begins with the weights of {uri}: 4 variables loaded"
    assert line in second.err.splitlines()
    # The manifests and the lineage name the checkpoint that each run began with.
    made = (each.answer["artifacts"]["checkpoint"] for each in (first, second))
    assert [storage.read_manifest(each).fields["warmed_from"] for each in made] == ["", uri]
    lineages = (each.manifest.fields["lineage"] for each in registry.versions(root, "digits"))
    assert [each["warmed_from"] for each in lineages] == ["", uri]


def test_a_resumed_run_goes_on_from_its_own_checkpoint(workdir, first, second):
    # The second run is now the champion, and the first run's checkpoint is deleted.
    shutil.rmtree(first.folder / "checkpoints")
    more = [*setting(training__steps=90), "--resume", second.answer["run_id"]]
    called = call("train", workdir, *more, cwd=workdir.parent)
    assert called.code == 0, called.err + called.log
    first_attempt, second_attempt = called.events(AttemptBegin)
    assert (first_attempt.resumed, second_attempt.resumed) == (False, True)
    assert second_attempt.global_step == 60
    assert len(called.events(WarmStart)) == 1
    manifest = storage.read_manifest(called.answer["artifacts"]["checkpoint"])
    assert called.answer["global_step"] == 90
    assert manifest.fields["warmed_from"] == first.answer["artifacts"]["checkpoint"]


SOFTMAX = setting(model__name="softmax", model__args="{}")
MNIST_FEW = setting(training__strategy="single", training__validate_every=0, gate__min="{}")
BETTER = setting(gate__champion__margin=-0.01, training__steps=900)


@pytest.fixture(scope="module")
def mnist_workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("mnist") / "runs"


@pytest.fixture(scope="module")
def words(mnist_dir):
    return [
        str(ROOT / "configs/mnist.yaml"), *MNIST_FEW, *setting(data__manual_dir=mnist_dir),
        *setting(export__formats="[saved_model]"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def root(mnist_workdir):
    return storage.uri_of(mnist_workdir)


@pytest.fixture(scope="module")
def mnist_first(mnist_workdir, words):
    """Train a linear model on a fifth of the examples; it becomes the first champion."""
    few = setting(training__steps=100)
    run = call("run", mnist_workdir, *words, *SOFTMAX, *few, cwd=mnist_workdir.parent)
    assert run.code == 0, run.err
    return run


def champion(root):
    return registry.champion(root, "mnist").number


def test_the_confusion_matrix_holds_every_test_example(mnist_first):
    measured = mnist_first.read("evaluation", "metrics.json")
    matrix = np.array(measured["confusion_matrix"])
    assert matrix.sum() == measured["examples"] == 10_000
    assert matrix.trace() / 10_000 == measured["metrics"]["accuracy"] > 0.7
    assert matrix.sum(axis=1).tolist() == [row["support"] for row in measured["per_class"]]


def test_one_that_was_made_worse_on_purpose_is_refused(mnist_first, mnist_workdir, words, root):
    few = setting(training__steps=3)
    run = call("run", mnist_workdir, *words, *SOFTMAX, *few, cwd=mnist_workdir.parent)
    assert run.code == 3, run.err
    assert "accuracy_difference -0." in run.answer["message"]
    assert run.answer["metrics"]["accuracy"] < mnist_first.answer["metrics"]["accuracy"]
    assert "model" not in run.answer["artifacts"]
    assert champion(root) == 1


def test_one_that_is_better_by_noise_alone_is_refused(mnist_first, tmp_path, root, monkeypatch):
    monkeypatch.setenv(run_store.RUN_FOLDER, str(tmp_path))
    config = load_config(mnist_first.folder / "config.json")
    rule = ChampionRule(margin=0.0)
    config = config.model_copy(update={"gate": config.gate.model_copy(update={"champion": rule})})
    dataset = mnist_first.answer["artifacts"]["dataset"]
    checkpoint = _noisy(config, dataset, mnist_first.answer["artifacts"]["checkpoint"], tmp_path)
    given = (config.model_dump_json(), root, "noise")
    trained = SimpleNamespace(dataset=dataset, checkpoint=checkpoint)
    made = to_evaluate(trained, tmp_path)
    own = {"decision_uri": str(tmp_path / "decision"), "decision": artifact_in(tmp_path)}
    assert evaluate_model.evaluate_model.python_func(*given, **made, **own) == "refused"
    evaluation = made["evaluation_metrics"].metadata["uri"]
    decision = (tmp_path / "decision").read_text()
    [rule] = json.loads(storage.read_file(decision, "decision.json"))["rules"]
    assert (rule["metric"], rule["passed"]) == ("accuracy_difference", False)
    paired = json.loads(storage.read_file(evaluation, "metrics.json"))["champion"]["paired"]
    assert paired["difference"] > 0, "it has more examples right than the champion"


def _noisy(config, dataset, checkpoint, folder):
    """Perturb the champion until a few more examples happen to be right, and publish the model."""
    spec = DatasetSpec.from_manifest(storage.read_manifest(dataset))
    trained = load_trained_model(config, spec, make_objective(config, spec), checkpoint, folder)
    model, step = trained.model, trained.global_step
    files = stage_shards(dataset, folder / "test", "test")
    [(images, labels)] = evaluation_batches(spec, files, batch_size=10_000)
    genuine, generator = model.get_weights(), np.random.default_rng(0)

    def right():
        return int((model.predict(images, verbose=0).argmax(axis=1) == labels.numpy()).sum())

    before = right()
    while not 0 < right() - before <= 5:
        noise = (generator.normal(scale=1e-3, size=each.shape) for each in genuine)
        model.set_weights([each + more for each, more in zip(genuine, noise, strict=True)])
    return publish_checkpoint(folder / "checkpoints", model, step)


@pytest.mark.usefixtures("mnist_first")
def test_one_that_dies_between_export_and_promotion_leaves_the_champion_and_goes_on(
    mnist_workdir, words, root
):
    promotions = storage.local_path(storage.join(registry.home(root, "mnist"), "promotions"))
    # The locked folder blocks the last step of a promotion.
    with (
        locked(promotions),
        calling("run", mnist_workdir, *words, *BETTER, cwd=mnist_workdir.parent) as run,
    ):
        folder = _until_it_is_registered(run, mnist_workdir, root)
        for process in processes_of(mnist_workdir):
            process.kill()
        out, err = run.communicate()
    assert run.returncode != 0, out + err
    done = {e.step for e in events.read(folder / "events.jsonl") if isinstance(e, StepEnd)}
    assert "export_model" in done
    assert "register_model" not in done
    assert champion(root) == 1
    assert [each.number for each in registry.promotions(root, "mnist")] == [1]

    resume = ["--resume", folder.name]
    again = call("run", mnist_workdir, *words, *BETTER, *resume, cwd=mnist_workdir.parent)
    assert again.code == 0, again.err
    assert champion(root) == 2
    assert registry.newest(root, "mnist") == 2
    assert again.read("registration", "registration.json")["promotion"] == 2
    rules = {rule["metric"]: rule for rule in again.read("decision", "decision.json")["rules"]}
    assert rules["accuracy_difference"]["value"] > 0.01


def _until_it_is_registered(run, mnist_workdir, root):
    """Wait until version 2 is registered; return the folder of its run."""
    while run.poll() is None:
        if len(registry.versions(root, "mnist")) == 2:
            [folder] = {path.parent for path in mnist_workdir.glob("*/events.jsonl")} - {
                path.parent for path in mnist_workdir.glob("*/report.html")
            }
            return folder
        time.sleep(0.05)
    raise AssertionError(run.communicate())


# Part of the store path that each stage requests.
STAGES = (
    "/datasets/", "/step-", "/logs/", "/evaluation/", "/decision/", "/model/", "/registry/",
    "report.html",
)  # fmt: skip


def test_an_outage_in_every_stage_ends_no_run(s3, monkeypatch, tmp_path):
    bucket = bucket_name()
    s3.create_bucket(bucket)
    left, healers = list(STAGES), []
    with link(int(s3.url.rpartition(":")[2])) as wire:

        def strike(request):
            if stage := next((each for each in left if each in request), ""):
                left.remove(stage)
                wire.becomes("refuse")
                healers.append(threading.Timer(1.0, wire.becomes, ["whole"]))
                healers[-1].start()

        monkeypatch.setenv("AWS_ENDPOINT_URL", wire.url)
        monkeypatch.setattr(s3.plan, "before", strike)
        settings = setting(
            storage__root=f"s3://{bucket}/root", training__strategy="single", training__steps=200,
            training__checkpoint_every=100, gate__min__accuracy=0.5,
        )  # fmt: skip
        done = call("run", tmp_path / "runs", *settings, cwd=tmp_path)
        for each in healers:
            each.join()
        assert done.code == 0, done.err + done.log
        assert left == []
        assert done.answer["global_step"] == 200
        assert set(done.statuses().values()) == {"done"}
        artifacts = dict(done.answer["artifacts"])
        assert storage.read_bytes(artifacts.pop("report"))
        for uri in artifacts.values():
            storage.verify(uri)
        assert storage.collect_garbage(f"s3://{bucket}/root") == []


SECRETS_FEW = setting(
    training__steps=20, training__strategy="single", training__checkpoint_every=10,
    training__validate_every=10, gate__min__accuracy=0.01,
)  # fmt: skip
# A store response that repeats the request's credentials.
REFUSAL = (
    "<Error><Code>AccessDenied</Code><Message>denied: Authorization: Bearer {0} at "
    "https://u:{0}@h/x?X-Amz-Signature={0}</Message></Error>"
)


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_found_in_every_form(secret):
    plain = SECRETS[secret]
    for text in (plain, quote(plain, safe=""), base64.b64encode(f"user:{plain}".encode()).decode()):
        assert (secret, "x") in list(found_in({"x": f"a {text} b".encode()}))


@pytest.mark.parametrize("code", [0, 1])
def test_a_whole_run_and_one_that_the_store_refuses_write_no_secret(
    tmp_path, monkeypatch, s3, code
):
    plant(tmp_path / "home", monkeypatch)
    bucket, folder = bucket_name(), tmp_path / "work"
    s3.create_bucket(bucket)
    folder.mkdir()
    if code:
        body = REFUSAL.format(SECRETS["key"]).encode()
        s3.plan.add(Fault(403, method="PUT", path="MANIFEST", body=body, times=99))
    root = setting(storage__root=f"s3://{bucket}/runs")
    done = call("run", folder / "runs", *SECRETS_FEW, *root, cwd=folder)
    assert done.code == code, done.err + done.log
    texts = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    texts |= {key: s3.content(bucket, key) for key in s3.keys(bucket)}
    texts |= {"stdout": done.out.encode(), "stderr": done.err.encode()}
    assert {"events.jsonl", "config.json", "pipeline.log"} <= {Path(name).name for name in texts}
    assert any(name.endswith("report.html") for name in texts) or code
    assert list(found_in(texts)) == []


CONFIG = ROOT / "configs" / "digits.yaml"
SIGNED_FEW = [
    "training.strategy=single", "training.steps=200", "gate.min.accuracy=0.5",
    "evaluation.baseline=none",
]  # fmt: skip


def change(folder, name):
    """Change one byte of a file and its checksum in the manifest, as an attacker would."""
    path = folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    manifest = folder / "MANIFEST.json"
    tree = json.loads(manifest.read_text())
    (entry,) = [each for each in tree["files"] if each["path"] == name]
    entry["crc32c"] = checksum(path).crc32c
    manifest.write_text(json.dumps(tree))


def test_a_signed_model_is_used_and_a_changed_one_is_not(tmp_path, monkeypatch, capsys):
    private, public = key_pair(tmp_path)
    monkeypatch.setenv(signing.PRIVATE_KEY, str(private))
    monkeypatch.setenv(signing.PUBLIC_KEY, str(public))
    workdir = tmp_path / "runs"
    result = local.run(CONFIG, settings=SIGNED_FEW, workdir=workdir)
    assert result.status == "blessed", result.message
    secret = private.read_text().splitlines()[1]
    written = [path for path in workdir.rglob("*") if path.is_file()]
    assert not [path for path in written if secret.encode() in path.read_bytes()]

    root = storage.uri_of(workdir)
    version = registry.version(root, "digits", 1)
    folder = storage.local_path(version.uri)
    assert signing.verify(version.uri)
    assert (folder / signing.PROVENANCE).is_file()
    assert models.promote("digits", 1, root=root).version == 1

    def predict():
        words = ["predict", "digits", "--split", "test", "-o", str(tmp_path / "answers.csv")]
        code = app.call([*words, "--workdir", str(workdir)])
        return code, capsys.readouterr().err

    assert predict()[0] == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    graph = f"{version.manifest.fields['saved_model']}/saved_model.pb"
    made = len(registry.promotions(root, "digits"))
    for name in (graph, "labels.txt", signing.SIGNATURE):
        change(folder, name)
        with pytest.raises(UserError, match="signature is not valid"):
            models.promote("digits", 1, root=root)
        for path, content in before.items():
            path.write_bytes(content)
    change(folder, graph)
    code, err = predict()
    assert (code, err.count("\n")) == (1, 1)
    assert "signature is not valid" in err
    assert len(registry.promotions(root, "digits")) == made
