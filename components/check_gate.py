"""Hold the metrics of a model against the policy of the configuration."""

from pathlib import Path

from kfp import dsl

from components.image import component
from components.locations import output_of, run_at
from components.record import StepOutput, tried
from trainer.config.schema import Config
from trainer.promotion import gate


# The word is the single output: KFP's local runner resolves a condition on no other.
@component
def check_gate(
    config: str, root: str, run_id: str, evaluation: str, decision: dsl.OutputPath(str)
) -> str:
    """Return "blessed" or "refused"; `decision` is the URI of the reasons."""
    from components.check_gate import run_step

    return run_step(config, root, run_id, evaluation, decision)


def run_step(config: str, root: str, run_id: str, evaluation: str, decision_path: str) -> str:
    """Return `blessed` or `refused`; the file `decision_path` gets the URI of the reasons."""

    def work(record: StepOutput) -> str:
        policy = Config.model_validate_json(config)
        output = output_of(root, run_id, "decision", evaluation, policy.gate.digest())
        decision = gate.check(policy, evaluation, output)
        word = "blessed" if decision.blessed else "refused"
        record.done(decision.uri, {"decision": word, "reasons": list(decision.reasons)})
        Path(decision_path).write_text(decision.uri, encoding="utf-8")
        return word

    return tried("check_gate", run_at(root, run_id), work)
