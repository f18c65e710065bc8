"""Hold the metrics of a model against the policy of the configuration."""

from pathlib import Path
from typing import Any

from kfp import dsl

from components import descriptor
from components.image import component
from components.locations import output_of, run_at
from components.records.record import StepOutput, tried
from trainer.code.delivery import configured
from trainer.config.schema import Config
from trainer.promotion import gate, trained


# The word is the single output: KFP's local runner resolves a condition on no other.
@component
def check_gate(
    config: str,
    root: str,
    run_id: str,
    evaluation: str,
    decision_uri: dsl.OutputPath(str),
    decision: dsl.Output[dsl.Artifact],
    evaluation_descriptor: dsl.Input[dsl.Metrics] = None,
) -> str:
    """Return "blessed" or "refused"; `decision_uri` is the URI of the reasons."""
    from components.check_gate import run_step

    return run_step(config, root, run_id, evaluation, decision_uri, decision, evaluation_descriptor)


def run_step(
    config: str,
    root: str,
    run_id: str,
    evaluation: str,
    uri_path: str,
    artifact: Any,
    evaluation_descriptor: Any = None,
) -> str:
    """Return `blessed` or `refused`; the file `uri_path` gets the URI of the reasons."""
    call = dict(locals())

    def work(record: StepOutput) -> str:
        descriptor.check(evaluation_descriptor, evaluation)
        policy = configured(config)
        decision = decided(policy, root, run_id, evaluation)
        word = "blessed" if decision.blessed else "refused"
        judged = {"decision": word, "reasons": list(decision.reasons)}
        if not decision.blessed:
            trained.end(root, run_id, word)
        record.done(decision.uri, judged)
        descriptor.describe(artifact, decision.uri, judged)
        Path(uri_path).write_text(decision.uri, encoding="utf-8")
        return word

    return tried("check_gate", run_at(root, run_id), work, call=call)


def decided(config: Config, root: str, run_id: str, evaluation: str) -> gate.Decision:
    """Return the gate's decision about an evaluation of a run."""
    output = output_of(root, run_id, "decision", evaluation, config.gate.digest())
    return gate.check(config, evaluation, output)
