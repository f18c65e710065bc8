"""Tasks on real data: each strategy passes the gate of its configuration."""

import pytest

from benchmarks import tasks
from flotilla.trainer.config.load import load_config

QUICK = {
    "diabetes": "sync_parameter_server",
    "linnerud": "multi_worker_mirrored",
    "digit_properties": "in_graph",
}
# Metrics that this benchmark does not measure.
ONLY_EVALUATED = {"wine": {"macro_f1"}, "clicks": {"query_auc"}}


def trials():
    for name in tasks.METRICS:
        for way in (tasks.FIT, *tasks.STRATEGIES):
            yield pytest.param(
                name, way, marks=pytest.mark.slow if QUICK.get(name) == way else pytest.mark.long
            )


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize(("name", "way"), list(trials()))
def test_it_reaches_the_thresholds_of_its_gate(name, way, tmp_path):
    gate = load_config(tasks.ROOT / "configs" / f"{name}.yaml").gate
    found = tasks.measured(name, way, 0, tmp_path)
    asked = (gate.min.keys() | gate.max.keys()) - ONLY_EVALUATED.get(name, set())
    assert asked
    assert asked <= found.keys()
    low = {metric: found[metric] for metric in asked & gate.min.keys()}
    high = {metric: found[metric] for metric in asked & gate.max.keys()}
    assert not {metric for metric, value in low.items() if value < gate.min[metric]}
    assert not {metric for metric, value in high.items() if value > gate.max[metric]}


def test_the_table_has_the_mean_and_the_range_of_all_seeds():
    found = {"wine": {"fit": [0.9, 1.0, 0.95], "single": [1.0]}}
    row = next(line for line in tasks.table(found).splitlines() if "`wine`" in line)
    assert row == (
        "| [`wine`](../configs/wine.yaml) | `classification` | `accuracy` | 0.95 (0.9 to 1) "
        "| 1 | not measured | not measured | not measured | not measured |"
    )


def test_each_task_has_a_configuration():
    configured = {tasks.task_of(name) for name in tasks.METRICS}
    named = {"classification", "sequence_to_label", "multi_output", "regression", "ranking"}
    assert configured == named | {
        "binary_classification",
        "multilabel_classification",
        "sequence_labelling",
    }
