"""Tests which values each configuration key accepts and rejects."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from pydantic import ValidationError

from flotilla.pipelines import settings as old_parameters
from flotilla.trainer.config import schema as module
from flotilla.trainer.config.data import LIMITS, RULES, DataGateConfig
from flotilla.trainer.config.load import load_config, parse_config
from flotilla.trainer.config.model import initial_weights
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError

ROOT = Path(module.__file__).parents[2]
KEYS = [".".join(key) for key, _ in old_parameters.keys().values()]
GOOD = [
    "name=a", "name=fashion-mnist_2.1", "name='7'", f"name={'a' * 50}",
    "data.dataset=mnist", "data.dataset=my.builders:Birds", "data.version=3.0.1",
    "data.shards=2", "data.shards=100000", "data.validation=0", "data.validation=0.5",
    "data.validation=5000", "data.validation=5000.0", "data.seed=2147483647",
    "model.name=cnn", "model.name=my.models:net", "model.args={hidden_units: [10], x: null}",
    "training.strategy=my.own:Strategy", "training.steps=1", "training.batch_size=1",
    "training.optimizer.name=muon", "training.optimizer.learning_rate=1e6",
    "training.optimizer.args={beta_1: 0.8}", "training.checkpoint_every=1",
    "training.checkpoint_seconds=0.5", "training.keep=1", "training.validate_every=0",
    "training.patience=3", "training.pull_every=5",
    "training.warm_start=champion", "training.warm_start=gs://b/run/checkpoints/step-00000500",
    "training.warm_start={from: champion, exclude: ['logits/*']}", "training.warm_start=a/b.keras",
    "training.warm_start={from: gs://b/c.keras, include: [a], exclude: []}",
    "training.warm_start.from=champion", "training.freeze=['hidden_0/*']", "training.hand_on=last",
    "training.mixed_precision=true", "training.mixed_precision=false",
    "training.mixed_precision=float16", "training.mixed_precision='true'", "training.ema=0.999",
    "training.accumulate=4", "training.jit_compile=true", "training.schedule.name=cosine",
    "training.schedule.warmup_steps=10", "data.partition=reshuffle", "cluster.gpus_per_worker=1",
    "cluster.gpu_memory_mb=512", "cluster.gpu_memory_fraction=0.3",
    "cluster.placement={'*': 'ps:0'}", "cluster.in_process=true",
    "training.strategy=single", "training.strategy=multi_worker_mirrored", "cluster.workers=8",
    "cluster.parameter_servers=3", "cluster.existing_servers=true",
    "training.profile=[]", "training.profile=[1, 2]", "training.profile=[1499, 1500]",
    "cluster.max_restarts=0", "cluster.communication=ring", "evaluation.batch_size=1",
    "gate.min={}", "gate.max.loss=3.5", "gate.min.accuracy=0", "gate.min.accuracy=1",
    "gate.min.loss=-2", "export.formats=[saved_model,tflite_int8]",
    "storage.root=''", "storage.root=file:///tmp/a b",
    "storage.root=gs://bucket/a", "storage.root=s3://bucket", "storage.root=minio://bucket?endpoint=x",
]  # fmt: skip
BAD = [
    ("name=Digits", "name: 'Digits' is not allowed: string should match pattern"),
    ("name=a/b", "name: 'a/b' is not allowed"),
    (f"name={'a' * 51}", "is not allowed"),
    ("name=a.", "name: 'a.' is not allowed"),
    ("data.dataset=''", "data: neither dataset nor source is set; give a TFDS dataset"),
    ("data.shards=0", "data.shards: 0 is not allowed: input should be greater than or equal to 1"),
    ("data.shards=100001", "less than or equal to 100000"),
    ("data.validation=-0.1", "data.validation: -0.1 is not allowed"),
    ("data.validation=1.5", "1.5 is not allowed: a count of examples must be a whole number"),
    ("data.seed=-1", "data.seed: -1 is not allowed"),
    ("data.seed=2147483648", "data.seed: 2147483648 is not allowed: input should be less than"),
    ("cluster.gpu_memory_fraction=1.5", "cluster.gpu_memory_fraction: 1.5 is not allowed"),
    ("model.name=mpl",
     "model.name: 'mpl' is not allowed: there is no model with this name; did you mean"),
    ("model.name=transformer",
     "(one of auto, softmax, mlp, cnn, two_tower, two_tower_ranker, gru, tabular, text, "
     "sequence, or package.module:name)"),
    ("model.name=':net'", "model.name: ':net' is not allowed"),
    ("model.name='my.models:'", "model.name: 'my.models:' is not allowed"),
    ("model.name='my models:net'", "model.name: 'my models:net' is not allowed"),
    ("model.args=[1]", "model.args: [1] is not allowed"),
    ("model.args={rate: .inf}", "model.args: inf is not a finite number"),
    ("model.args={a: [{b: .nan}]}", "model.args: nan is not a finite number"),
    ("training.optimizer.args={beta_1: .inf}", "training.optimizer.args: inf is not a finite"),
    ("training.strategy=sync", "training.strategy: 'sync' is not allowed: there is no strategy"),
    ("training.strategy='..:A'", "training.strategy: '..:A' is not allowed"),
    ("training.steps=0", "training.steps: 0 is not allowed"),
    ("training.steps=1.5", "training.steps: 1.5 is not allowed: input should be a valid integer"),
    ("training.steps=true", "training.steps: True is not allowed: input should be a valid integer"),
    ("training.steps='5'", "training.steps: '5' is not allowed: input should be a valid integer"),
    ("training.steps=", "training.steps: None is not allowed: input should be a valid integer"),
    ("training.batch_size=0", "training.batch_size: 0 is not allowed"),
    ("training.optimizer.name=adm", "training.optimizer.name: 'adm' is not allowed"),
    ("training.optimizer.name=zzz",
     "there is no optimizer with this name (one of adadelta, adafactor,"),
    ("training.optimizer.learning_rate=0", "0 is not allowed: input should be greater than 0"),
    ("training.optimizer.learning_rate=.nan", "nan is not allowed: input should be a finite"),
    ("training.strategy=singel", "there is no strategy with this name; did you mean 'single'?"),
    ("training.pull_every=0", "training.pull_every: 0 is not allowed"),
    ("training.replicas_to_aggregate=-1", "training.replicas_to_aggregate: -1 is not allowed"),
    ("training.schedule.warmup_steps=-1", "training.schedule.warmup_steps: -1 is not allowed"),
    ("training.schedule.args={alpha: 0.1}", "args.alpha of constant: "),
    ("data.partition=shuffle", "data.partition: 'shuffle' is not allowed"),
    ("data.image={channels: 1}", "size: required unless channels is 3; set [height, width]"),
    ("data.image={size: [8]}", "write it as [height, width]"),
    ("data={buckets: [4], partition: dynamic}", "buckets: they group examples by length"),
    ("data.buckets=[8, 4]", "the lengths must be in ascending order"),
    ("cluster.gpus_per_worker=-1", "cluster.gpus_per_worker: -1 is not allowed"),
    ("cluster.placement={'*': 'ps0'}", "cluster.placement: '*' is placed on 'ps0'; write the"),
    ("cluster.placement={'*': 'ps:1'}",
     "cluster.placement: '*' is placed on 'ps:1'; it must be ps:0 to ps:0"),
    ("cluster.placement={'*': 0}", "cluster.placement.*: 0 is not allowed"),
    ("training.schedule.name=cosin", "'constant', 'cosine', 'exponential' or 'piecewise'"),
    ("training.checkpoint_every=0", "training.checkpoint_every: 0 is not allowed"),
    ("training.checkpoint_seconds=-1", "training.checkpoint_seconds: -1 is not allowed"),
    ("training.keep=0", "training.keep: 0 is not allowed"),
    ("training.mixed_precision=1", "input should be '', 'bfloat16' or 'float16'"),
    ("training.mixed_precision=fp16", "input should be '', 'bfloat16' or 'float16'"),
    ("training.accumulate=0", "training.accumulate: 0 is not allowed"),
    ("training.ema=1", "training.ema: 1 is not allowed: input should be less than 1"),
    *((f"training.profile={steps}", f"training.profile: {steps} is not a first step and a later")
      for steps in ([100], [100, 100], [110, 100], [0, 5], [1, 2, 3])),
    ("training.profile=[1490, 1501]", "training.profile: step 1501 is after the end of training; "
     "use steps up to training.steps (1500)"),
    ("training.warm_start={from: 5}",
     "training.warm_start: the URI of the weights is missing; write {from: URI}"),
    ("training.warm_start=[champion]", "write a URI, champion, or {from, include, exclude}"),
    ("training.warm_start=5",
     "5 is not allowed: write a URI, champion, or {from, include, exclude}"),
    ("training.freeze=hidden", "training.freeze: 'hidden' is not allowed"),
    ("training.hand_on=newest",
     "training.hand_on: 'newest' is not allowed: input should be 'best' or"),
    ("cluster.launcher=slurm", "cluster.launcher: 'slurm' is not allowed: input should be 'local'"),
    ("cluster.workers=0", "cluster.workers: 0 is not allowed"),
    ("cluster.communication=gloo", "cluster.communication: 'gloo' is not allowed"),
    ("cluster.max_restarts=-1", "cluster.max_restarts: -1 is not allowed"),
    ("gate.min.accuracy=1.1", "gate.min: accuracy is a share: 1.1 is not between 0 and 1"),
    ("gate.max.macro_f1=-0.1", "gate.max: macro_f1 is a share: -0.1 is not between 0 and 1"),
    ("gate.min.accuracy=.nan", "gate.min.accuracy: nan is not allowed"),
    ("gate.min.accuracy=high", "gate.min.accuracy: 'high' is not allowed"),
    ("export.formats=[]", "export.formats: [] is not allowed"),
    ("export.formats=[onnx]",
     "'onnx' is not allowed: input should be 'saved_model', 'keras', 'tflite' or 'tflite_int8'"),
    ("export.formats=keras", "export.formats: 'keras' is not allowed"),
    ("storage.root=runs", "storage.root: 'runs' is not allowed: it is not a URI"),
    ("storage.root=file://runs", "storage.root: 'file://runs' is not allowed: it is not a URI"),
    ("storage.root=file:///", "storage.root: 'file:///' is not allowed: it is not a URI"),
    ("storage.root=gs://", "storage.root: 'gs://' is not allowed: it is not a URI"),
    ("storage.root=gs:/bucket", "storage.root: 'gs:/bucket' is not allowed: it is not a URI"),
    ("storage.root=http://host/a", "write it as file:///path, gs://, s3:// or minio://"),
]  # fmt: skip


def refused(*assignments):
    with pytest.raises(ConfigError) as caught:
        load_config(None, assignments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_what_is_allowed_and_what_is_refused_by_name():
    for assignment in GOOD:
        assert isinstance(load_config(None, [assignment]), Config)
    for assignment, said in BAD:
        assert said in refused(assignment), assignment
    assert refused("export.formats=[saved_model,onnx]").count("export.formats") == 1


def test_a_value_is_what_was_written():
    config = load_config(None, ["data.validation=5000", "storage.root=file:///tmp/runs/", "name=m"])
    assert config.data.validation == 5000
    assert config.storage.root == "file:///tmp/runs"
    assert config.name == "m"
    assert config.training == Config().training


def test_no_key_is_accepted_and_then_ignored():
    unused = {key.rpartition(".")[2] for key in KEYS}
    for package in ("trainer", "components", "pipelines"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if path.name == "config.py" or not any(f".{each}" in text for each in unused):
                continue
            nodes = ast.walk(ast.parse(text))
            unused -= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert not unused


# Settings that are allowed alone or together, and those that are refused together.
GOOD_TOGETHER = [
    ["cluster.communication=nccl", "cluster.gpus_per_worker=1"],
    ["training.replicas_to_aggregate=3"],
    ["training.replicas_to_aggregate=3", "training.strategy=sync_parameter_server",
     "cluster.workers=3"],
    ["cluster.workers=9", "data.shards=9"],
    ["cluster.workers=9", "data.partition=reshuffle"],
    ["cluster.workers=9", "data.partition=dynamic"],
    ["cluster.workers=9", "training.strategy=single"],
    ["training.strategy=mine.steps:Own"], ["data.disk=1GB"],
]  # fmt: skip
BAD_TOGETHER = [
    (["cluster.gpu_memory_fraction=0.5", "cluster.gpu_memory_mb=512"],
     "cluster.gpu_memory_fraction: cluster.gpu_memory_mb is also set; set only one of them"),
    (["cluster.communication=nccl"],
     "cluster.communication: nccl needs GPUs; set cluster.gpus_per_worker, or choose ring or auto"),
    (["training.replicas_to_aggregate=3", "training.strategy=sync_parameter_server"],
     "training.replicas_to_aggregate: 2 workers cannot send 3 gradients for an update; "
     "set it to 2 or less (0: one from each worker)"),
    (["cluster.workers=9"],
     "cluster.workers: 9 workers cannot share 8 shards; set data.shards to 9 or more"),
    (["data.partition=dynamic", "training.strategy=mine.steps:Own"],
     "data.partition: dynamic works only with the strategies single,"),
    (["data.partition=dynamic", "data.disk=1GB"],
     "data.disk: with data.partition: dynamic, a worker may be assigned any example"),
    (["training.patience=2", "training.validate_every=0"],
     "training.patience: early stopping needs"),
    (["training.patience=2", "data.validation=0"], "training.patience: early stopping needs"),
    *((["cluster.existing_servers=true", f"training.strategy={name}"],
       f"cluster.existing_servers: {name} has no servers; leave it out, or choose a strategy with "
       "parameter servers") for name in ("multi_worker_mirrored", "single")),
    (["cluster.existing_servers=true", "cluster.in_process=true"],
     "cluster.existing_servers: cluster.in_process, which starts servers, is also set; leave one "
     "of them out"),
    (["data.source=a.csv", "model.name=two_tower"], "data.inputs: two_tower needs the ids of"),
    (["task.name=recommendation"], "data.group: the task recommendation computes metrics by"),
    # These numbers would not survive their way through KFP or TensorFlow.
    *(([f"{key}={value}"], f"{key}: {value} is not allowed: ") for key, value in (
        ("training.steps", 10**23), ("training.batch_size", 10**11), ("training.keep", 2**53 + 1),
        ("evaluation.batch_size", 2**31))),
]  # fmt: skip


def test_what_is_refused_together_is_named():
    for assignments in GOOD_TOGETHER:
        assert load_config(None, assignments)
    for assignments, said in BAD_TOGETHER:
        assert refused(*assignments).startswith(said), assignments


def test_it_is_frozen_and_its_values_are_not_shared():
    config = Config()
    with pytest.raises(ValidationError, match="frozen"):
        config.name = "other"
    with pytest.raises(ValidationError, match="frozen"):
        config.training.steps = 3
    first, second = parse_config({}), parse_config({})
    first.model.args["hidden_units"] = [1]
    assert second.model.args == {} == Config().model.args


def test_the_digest_is_of_everything():
    assert parse_config({"training": {"steps": 1500}}).digest() == Config().digest()
    changed = [Config().digest(), *(load_config(None, [each]).digest() for each in GOOD[:8])]
    assert len(set(changed)) == len(changed)


def test_a_task_reads_the_configuration_that_its_launcher_had():
    config = load_config(None, ["model.args={lr: 1e-7, n: [1, {ö: null}]}", "gate.min.loss=1e22"])
    again = Config.model_validate_json(config.model_dump_json())
    assert again == config
    assert again.digest() == config.digest()


def test_every_key_says_what_it_is():
    for name, (_, field) in old_parameters.keys().items():
        assert field.description, name
        assert "\n" not in field.description, name


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("", ""),
        ("champion", "champion"),
        ("gs://b/c/", "gs://b/c"),
        ("s3://b/c.keras", "s3://b/c.keras"),
        ("file:///models/a.keras", "file:///models/a.keras"),
        ({"from": "champion"}, "champion"),
        ({"from": "champion", "include": [], "exclude": []}, "champion"),
        ({"from": "gs://b/c/", "exclude": ["a"]}, {"from": "gs://b/c", "exclude": ["a"]}),
        ("/models/base.keras", "file:///models/base.keras"),
        ({"from": "/models/base.keras", "include": ["a"]},
         {"from": "file:///models/base.keras", "include": ["a"]}),
    ],
)  # fmt: skip
def test_a_warm_start_is_kept_in_one_form(value, kept):
    config = parse_config({"training": {"warm_start": value}})
    assert config.training.warm_start == kept
    assert initial_weights(value).is_partial == isinstance(kept, dict)
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_the_rules_and_limits_of_the_data_gate():
    gate = DataGateConfig()
    assert {gate.action(rule) for rule in RULES} <= {"refuse", "warn", "off"}
    for name, (default, least, most, _) in LIMITS.items():
        assert least <= gate.limit(name) == default <= most
    gate = DataGateConfig(rules={"all": "warn", "leakage": "refuse"})
    assert gate.action("leakage") == "refuse"
    assert gate.action("type") == "warn"
