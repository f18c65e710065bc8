"""Hold the metrics of a model against the policy of the configuration."""

from pathlib import Path

from kfp import dsl

from components import descriptor
from components.image import component
from components.records.record import Step
from components.records.run_store import output_of
from trainer.code.bundle import configured
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
    from components.check_gate import work
    from components.records.record import run

    return run(work, locals())


def work(step: Step) -> str:
    """Return `blessed` or `refused`; the file `decision_uri` gets the URI of the reasons."""
    descriptor.check(step.evaluation_descriptor, step.evaluation)
    policy = configured(step.config)
    decision = decided(policy, step.root, step.run_id, step.evaluation)
    if not decision.blessed:
        trained.end(step.root, step.run_id, decision.word)
    step.output.done(decision.uri, decision.in_words)
    descriptor.describe(step.decision, decision.uri, decision.in_words)
    Path(step.decision_uri).write_text(decision.uri, encoding="utf-8")
    return decision.word


def decided(config: Config, root: str, run_id: str, evaluation: str) -> gate.Decision:
    """Return the gate's decision about an evaluation of a run."""
    output = output_of(root, run_id, "decision", evaluation, config.gate.digest())
    return gate.check(config, evaluation, output)
