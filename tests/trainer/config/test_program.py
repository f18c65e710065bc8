"""Tests the `program` section: what it accepts, and which other settings it excludes."""

import pytest

from flotilla.trainer.config.load import load_config, override, parse_config
from flotilla.trainer.config.program import fill
from flotilla.trainer.config.topology import Task
from flotilla.trainer.runtime.errors import ConfigError

COMMAND = ["python", "train.py", "--task={index}", '{"lr": 1}']


def parse(program=None, **sections):
    return parse_config({"program": {"command": COMMAND, **(program or {})}, **sections})


def test_a_program_has_the_roles_of_the_strategy_or_its_own():
    assert parse().topology.tasks(servers=1, workers=2) == {"ps": 1, "worker": 2, "chief": 1}
    config = parse({"roles": {"ps": 2, "worker": 3, "evaluator": 1}})
    cluster = config.cluster
    assert (cluster.workers, cluster.parameter_servers) == (3, 2)
    assert config.topology.tasks(servers=2, workers=3) == {"ps": 2, "worker": 3}
    assert config.has_evaluator
    leads = [config.topology.leads(Task(role="worker", index=index)) for index in range(3)]
    assert leads == [True, False, False]
    every = parse({"roles": {"worker": 2}}).topology
    assert all(every.leads(Task(role="worker", index=index)) for index in range(2))


def test_a_program_is_read_with_its_assignments_and_again(tmp_path):
    config = parse({"env": {"A": "{steps}"}, "roles": {"worker": 1}}, data={"source": "a.csv"})
    assert parse_config(config.model_dump(mode="json")) == config
    assert override(config, ["training.seed=3"]).training.seed == 3
    path = tmp_path / "a.yaml"
    path.write_text("program: {command: [python, a.py]}\ndata: {source: a.csv, label: y}\n")
    config = load_config(path, ["program.after_training=evaluate"])
    assert config.model.name == "mlp"
    assert config.program.after_training == "evaluate"


def test_only_placeholders_are_replaced():
    assert fill('{index} {{x}} {"a": {}} {a b}', {"index": "3", "x": "y"}) == (
        '3 {y} {"a": {}} {a b}'
    )


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"program": {"command": ["a", "{indx}"]}}, "no placeholder {indx}; did you mean"),
        ({"program": {"command": ["a"], "env": {"A": "{x}"}}}, "no placeholder {x}"),
        ({"program": {"command": [" "]}}, "the program, is empty"),
        ({"program": {"command": ["a"], "roles": {"wrker": 1}}}, "no role 'wrker'"),
        ({"program": {"command": ["a"], "roles": {"ps": 1}}},
         "there is no leading task; add the role chief"),
        ({"program": {"command": ["a"], "roles": {"chief": 2}}}, "at most one task may have it"),
        ({"program": {"command": ["a"], "env": {"TF_CONFIG": "x"}}}, "set by Flotilla"),
        ({"program": {"command": ["a"], "env": {"A B": "x"}}},
         "not a valid name for an environment variable"),
        ({"program": {"command": ["a"], "env": {"HF_TOKEN": "hf_x"}}}, "HF_TOKEN looks like a"),
        ({"program": {"command": ["a"], "checkpoint_marker": "a/b"}},
         "give a file name without a folder"),
        ({"program": {"env": {"A": "x"}}}, "program.env: it has no effect without program.command"),
        ({"program": {"command": ["a"]}, "training": {"optimizer": {"name": "sgd"}}},
         "training.optimizer: it has no effect on program.command, which trains its own"),
        ({"program": {"command": ["a"]}, "model": {"name": "cnn"}},
         "model.name: it has no effect on program.command"),
        ({"program": {"command": ["a"]}, "data": {"disk": "1GB"}},
         "data.disk: it has no effect on program.command"),
        ({"program": {"command": ["a"]}, "data": {"partition": "dynamic"}}, "choose disjoint"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_its_key(tree, said):
    with pytest.raises(ConfigError, match="program") as error:
        parse_config(tree)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
