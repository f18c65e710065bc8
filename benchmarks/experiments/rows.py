"""The published experiments, each with the published result, the goal, and its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from benchmarks.experiments.measure import Measured, Run

SEEDS = range(5)
# Tolerance between two mean losses over the same examples, which are summed in different orders.
SAME_LOSS = 1e-4
# Minimum decrease of the loss in one epoch with a very small learning rate.
LEAST_FALL = 0.005


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The measured results of a row of the table, and whether they reach the goal."""

    text: str
    reached: bool


Judge = Callable[[Sequence[Measured]], Finding]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One experiment.

    Attributes:
        program: a key of `PROGRAMS`.
        published: the published result.
        goal: the result to reach.
        runs: the runs of the experiment.
        judge: returns the finding from the results of the runs.
    """

    program: str
    published: str
    goal: str
    runs: tuple[Run, ...]
    judge: Judge


def accuracy_of(least: float) -> Judge:
    """Return a judge that evaluates one run by its accuracy on the test split."""

    def judge(brought: Sequence[Measured]) -> Finding:
        (run,) = brought
        return Finding(text=f"accuracy {run.accuracy:.4f}", reached=run.accuracy >= least)

    return judge


def synchronous(least: float, workers: int) -> Judge:
    """Return a judge of one run: its accuracy, and one gradient per worker in each update."""

    def judge(brought: Sequence[Measured]) -> Finding:
        (run,) = brought
        counted = f"{run.local_steps:,} local steps = {workers} x {run.global_step:,}"
        exact = run.local_steps == workers * run.global_step
        return Finding(
            text=f"accuracy {run.accuracy:.4f}; {counted if exact else run.local_steps}",
            reached=exact and run.accuracy >= least,
        )

    return judge


def fallen(brought: Sequence[Measured]) -> Finding:
    """Evaluate runs with several seeds by the mean decrease of their test loss."""
    fall = mean(run.first_loss - run.loss for run in brought)
    ends = ", ".join(f"{run.loss:.4f}" for run in brought)
    last = ", ".join(f"{run.last_loss:.4f}" for run in brought)
    text = f"test loss fallen by {fall:.4f} to {ends}; training loss at the end {last}"
    return Finding(text=text, reached=fall >= LEAST_FALL)


def same_losses(brought: Sequence[Measured]) -> Finding:
    """Evaluate pairs of a mirrored run and a single-process run with the same seed."""
    pairs = list(zip(brought[::2], brought[1::2], strict=True))
    training = max(abs(left.training_loss - right.training_loss) for left, right in pairs)
    test = max(abs(left.loss - right.loss) for left, right in pairs)
    text = f"training loss within {training:.1e}, test loss within {test:.1e}"
    return Finding(text=text, reached=max(training, test) <= SAME_LOSS)


def _softmax(kind: str, least: float, *settings: str) -> Row:
    judge = accuracy_of(least) if kind == "async" else synchronous(least, workers=3)
    own = bool(settings)
    published = "0.8865, 0.8866, 0.8894" if kind == "async" and not own else "none"
    begins = "from Keras's own weights" if own else "from weights of a unit normal"
    exact = "; 3 local steps an update" if kind == "sync" else ""
    return Row(
        program=f"{kind}_softmax",
        published=published,
        goal=f"{least} {begins}{exact}",
        runs=(Run(config=f"configs/mnist_{kind}_softmax.yaml", settings=settings),),
        judge=judge,
    )


def _mlp(kind: str, *settings: str) -> Row:
    """Return the row of a network with one hidden layer. A constant learning rate has no goal."""
    least = 0.0 if settings else 0.97
    exact = "" if kind == "async" else "; 2 local steps an update"
    goal = f"none{exact}; the rate stays at 0.01" if settings else f"{least}{exact}; cosine decay"
    return Row(
        program=f"{kind}_mlp",
        published="none but the cross entropy",
        goal=goal,
        runs=(Run(config=f"configs/mnist_{kind}_mlp.yaml", settings=settings),),
        judge=accuracy_of(least) if kind == "async" else synchronous(least, workers=2),
    )


def _seed(seed: int, *settings: str) -> Run:
    return Run(config=_MIRRORED, settings=(f"training.seed={seed}", *settings))


_MIRRORED = "configs/mnist_mirrored_cnn.yaml"
_KERAS_WEIGHTS = ("model.args.kernel_initializer=glorot_uniform", "gate.min.accuracy=0.91")
_CONSTANT = ("training.schedule.name=constant",)
_ONE_PROCESS = ("training.strategy=single", "training.batch_size=256")
_ADAM = (
    "training.optimizer.name=adam",
    "training.optimizer.learning_rate=0.001",
    "gate.min.accuracy=0.985",
)
# Settings for three epochs, with a large and with a small batch.
_LARGE_BATCH = ("training.steps=702",)
_SMALL_BATCH = (
    "training.batch_size=4",
    "training.steps=11250",
    "training.schedule.name=cosine",
)

ROWS = (
    _softmax("async", 0.8865),
    _softmax("async", 0.91, *_KERAS_WEIGHTS),
    _softmax("sync", 0.8865),
    _softmax("sync", 0.91, *_KERAS_WEIGHTS),
    *(_mlp(kind, *rate) for kind in ("async", "sync") for rate in ((), _CONSTANT)),
    Row(
        program="mirrored_cnn",
        published="loss 2.2939 at the end, 2.2987 in evaluation",
        goal=f"test loss fallen by {LEAST_FALL} in the mean of five seeds",
        runs=tuple(_seed(seed) for seed in SEEDS),
        judge=fallen,
    ),
    Row(
        program="mirrored_cnn",
        published="none",
        goal=f"the losses of one process with batch 256 within {SAME_LOSS:g}",
        runs=tuple(run for seed in SEEDS for run in (_seed(seed), _seed(seed, *_ONE_PROCESS))),
        judge=same_losses,
    ),
    Row(
        program="mirrored_cnn",
        published="none",
        goal="0.985 with Adam 0.001 in three epochs; 4 replicas of batch 4, cosine decay",
        runs=(Run(config=_MIRRORED, settings=(*_ADAM, *_SMALL_BATCH)),),
        judge=accuracy_of(0.985),
    ),
    Row(
        program="mirrored_cnn",
        published="none",
        goal="none; Adam 0.001 in three epochs, 4 replicas of batch 64",
        runs=(Run(config=_MIRRORED, settings=(*_ADAM, *_LARGE_BATCH)),),
        judge=accuracy_of(0.0),
    ),
    Row(
        program="in_graph",
        published="none",
        goal="0.97",
        runs=(Run(config="configs/mnist_in_graph.yaml"),),
        judge=accuracy_of(0.97),
    ),
)
