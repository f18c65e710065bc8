"""Strategies by name, and the user's own."""

from __future__ import annotations

import pytest

from trainer.config.schema import STRATEGIES, Config, TrainingConfig
from trainer.errors import ConfigError
from trainer.strategies.async_parameter_server import AsyncParameterServer
from trainer.strategies.strategy import Strategy, create
from trainer.topology import Cluster, Task

CLUSTER = Cluster(addresses={"chief": ("a:1",), "ps": ("a:2",), "worker": ("a:3",)})
CHIEF = Task(role="chief", index=0)
OWN = """
from tests.trainer.plain import Plain
from trainer.strategies.strategy import Strategy

class Good(Plain): ...

class Half(Strategy):
    def build(self, problem): ...
    def run(self, steps): ...

class Unrelated: ...

value = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch, request):
    name = f"own_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(OWN)
    (tmp_path / f"{name}_broken.py").write_text("def (:\n")
    (tmp_path / f"{name}_failing.py").write_text("raise RuntimeError('first\\nsecond')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def config_of(name):
    return Config(training=TrainingConfig.model_construct(strategy=name))


def refused(name):
    with pytest.raises(ConfigError) as caught:
        create(config_of(name), CLUSTER, CHIEF)
    message = str(caught.value)
    assert message.startswith("training.strategy: ")
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_name_of_the_configuration_is_a_strategy(name):
    assert isinstance(create(config_of(name), CLUSTER, CHIEF), Strategy)


def test_a_built_in_one_is_made_for_its_cluster_without_connecting_to_it():
    config = config_of("async_parameter_server")
    strategy = create(config, CLUSTER, CHIEF)
    assert type(strategy) is AsyncParameterServer
    assert strategy.config is config
    assert strategy.cluster is CLUSTER
    assert strategy.task is CHIEF
    assert strategy.io_device == "/job:chief/task:0"


def test_a_users_own(own):
    strategy = create(config_of(f"{own}:Good"), CLUSTER, CHIEF)
    assert type(strategy).__name__ == "Good"
    assert strategy.cluster is CLUSTER


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{own}_absent:Good", "cannot import '{own}_absent:Good': ModuleNotFoundError: No module"),
        ("{own}:Absent", "cannot import '{own}:Absent': AttributeError: module '{own}' has no"),
        ("{own}", "cannot import '{own}': "),
        (":Good", "cannot import ':Good': "),
        (".own:Good", "cannot import '.own:Good': "),
        ("{own}_broken:Good", "cannot import '{own}_broken:Good': SyntaxError: invalid syntax"),
        ("{own}_failing:Good", "cannot import '{own}_failing:Good': RuntimeError: first ("),
        ("{own}:Unrelated", "'{own}:Unrelated' is not a subclass of Strategy"),
        ("{own}:value", "'{own}:value' is not a subclass of Strategy"),
        ("{own}:Half", "'{own}:Half' does not define global_step, learning_rate, variables"),
    ],
)
def test_what_is_no_strategy_is_refused_by_name(own, name, said):
    assert refused(name.format(own=own)).startswith(f"training.strategy: {said.format(own=own)}")
