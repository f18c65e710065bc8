"""Which servers and workers a run is best trained with: predicted, nothing is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pipelines.planning.costs import Costs, Model, measured, work_of
from pipelines.planning.simulation import Fleet, simulated
from trainer.cluster import fitting
from trainer.config.schema import Config
from trainer.errors import ConfigError

STRATEGY = "async_parameter_server"
ROLES = ("chief", "ps", "worker")
_GIGABIT = 1e9 / 8
# What is proposed is not slower than so much of the fastest.
_ENOUGH = 0.9
_MOST = {"workers": 10_000, "servers": 1000}
# What an option may be; beyond these a number is a slip, and its simulation takes hours or memory.
_RANGES = {
    "cores": (0, 10_000),
    "worker_cores": (1, 10_000),
    "server_cores": (1, 10_000),
    "bandwidth": (0.001, 100_000),
    "round_trip": (0, 60_000),
    "gradient": (0, 86_400),
}
_MOST_PRICE = 1e6
_DIGITS, _QUOTED = 9, 40


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Where it would run.

    Attributes:
        cores: of one machine that all tasks share; 0 where each task has its own.
        worker_cores: of each worker's own machine.
        server_cores: of each server's own machine.
        gigabits: a second, of each machine's network, each way.
        round_trip: seconds.
        gradient: seconds of one batch on such a worker; 0: as measured here.
        workers: numbers to try.
        servers: numbers to try.
        prices: of a task for an hour, by role.
    """

    cores: int = 0
    worker_cores: int = 1
    server_cores: int = 4
    gigabits: float = 10.0
    round_trip: float = 2e-4
    gradient: float = 0.0
    workers: tuple[int, ...] = ()
    servers: tuple[int, ...] = ()
    prices: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is predicted of one number of workers and servers.

    Attributes:
        workers: how many.
        servers: how many.
        rate: updates (global steps) a second.
        examples: a second.
        seconds: of all steps, without starting and ending.
        limit: what keeps it from being faster.
        memory: bytes of a task by role; of the fullest server.
        cost: in the unit of the prices; 0 without them.
    """

    workers: int
    servers: int
    rate: float
    examples: float
    seconds: float
    limit: str
    memory: Mapping[str, int]
    cost: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Plans:
    """All plans, the one of the configuration, and the one that is proposed."""

    plans: tuple[Plan, ...]
    configured: Plan
    proposed: Plan
    calibration: Mapping[str, Any]


def options_of(
    counts: Mapping[str, str], prices: Sequence[str], numbers: Mapping[str, float]
) -> PlanOptions:
    """Return options from text such as `1,2,4` and `worker=0.4`; raises `ConfigError`."""
    for name, value in numbers.items():
        low, high = _RANGES[name]
        if not low <= value <= high:
            raise ConfigError(f"--{name.replace('_', '-')}: {value} is not from {low} to {high}")
    wanted = {name: _counts(name, text) for name, text in counts.items()}
    return PlanOptions(
        cores=int(numbers["cores"]),
        worker_cores=int(numbers["worker_cores"]),
        server_cores=int(numbers["server_cores"]),
        gigabits=numbers["bandwidth"],
        round_trip=numbers["round_trip"] / 1e3,
        gradient=numbers["gradient"],
        prices=_prices(prices),
        **wanted,
    )


def _counts(name: str, text: str) -> tuple[int, ...]:
    found = []
    for each in text.split(",") if text else ():
        digits = each.strip()
        is_number = digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS
        number = int(digits) if is_number else 0
        if not 0 < number <= _MOST[name]:
            raise ConfigError(
                f"--{name}: {each[:_QUOTED]!r} is no number from 1 to {_MOST[name]}; "
                "write them as 1,2,4"
            )
        found.append(number)
    return tuple(sorted(set(found)))


def _prices(given: Sequence[str]) -> dict[str, float]:
    found = {}
    for each in given:
        role, equals, text = each.partition("=")
        try:
            price = float(text)
        except ValueError:
            price = -1.0
        if role not in ROLES or not equals or not 0 <= price <= _MOST_PRICE:
            raise ConfigError(
                f"--price: {each[:_QUOTED]!r} is no price of an hour; write ROLE=NUMBER "
                f"with one of {', '.join(ROLES)}, such as worker=0.40"
            )
        if role in found:
            raise ConfigError(f"--price: {role} has two prices")
        found[role] = price
    return found


def planned(config: Config, options: PlanOptions, say: Callable[[str], None]) -> Plans:
    """Measure a gradient of the model in a process of its own, and return all plans.

    Raises:
        ConfigError: the strategy is another one, or the model cannot be measured.
    """
    if config.training.strategy != STRATEGY:
        raise ConfigError(
            f"training.strategy: a plan is made for {STRATEGY}, whose costs are measured, and not "
            f"for {config.training.strategy}"
        )
    options = with_counts(config, options)
    say("measuring a gradient of the model")
    found = fitting.calibrated(config, options.servers)
    return plans_of(config, options, found, measured())


def with_counts(config: Config, options: PlanOptions) -> PlanOptions:
    """Return the options with the numbers that are tried where none were named."""
    most = config.data.shards if config.data.partition == "disjoint" else _MOST["workers"]
    top = 16 if options.cores else 128
    powers = tuple(2**i for i in range(8))
    workers = options.workers or tuple(n for n in powers if n <= min(top, most))
    servers = options.servers or powers[: 3 if options.cores else 4]
    if workers[-1] > most:
        raise ConfigError(
            f"--workers: {workers[-1]} workers and {most} shards; set data.shards, or "
            "data.partition to dynamic"
        )
    own = config.cluster
    return replace(
        options,
        workers=tuple(sorted({*workers, own.workers})),
        servers=tuple(sorted({*servers, own.parameter_servers})),
    )


def plans_of(
    config: Config, options: PlanOptions, calibration: Mapping[str, Any], costs: Costs
) -> Plans:
    """Return all plans of a model that was measured."""
    plans = tuple(
        _plan(config, options, calibration, costs, (workers, servers))
        for workers in options.workers
        for servers in options.servers
    )
    own = (config.cluster.workers, config.cluster.parameter_servers)
    (configured,) = (each for each in plans if (each.workers, each.servers) == own)
    enough = _ENOUGH * max(each.rate for each in plans)
    fast = [each for each in plans if each.rate >= enough]
    proposed = min(fast, key=lambda p: (p.cost, p.workers + p.servers, -p.rate))
    return Plans(
        plans=plans, configured=configured, proposed=proposed, calibration=dict(calibration)
    )


def _plan(
    config: Config,
    options: PlanOptions,
    calibration: Mapping[str, Any],
    costs: Costs,
    tasks: tuple[int, int],
) -> Plan:
    workers, servers = tasks
    training = config.training
    held = calibration["held"][str(servers)]
    model = Model(gradient=calibration["gradient"], held=held, pull_every=training.pull_every)
    if calibration["gpu"] or options.gradient:
        # What was measured is that of a worker, and not of a core that others use as well.
        seconds = options.gradient or calibration["gradient"]
        model = replace(model, gradient=seconds / costs.gradient)
    byte = 1 / (options.gigabits * _GIGABIT)
    work = work_of(costs, model, workers=workers, cores=options.cores, byte=byte)
    fleet = Fleet(
        workers=workers,
        cores=options.cores,
        worker_cores=options.worker_cores,
        server_cores=options.server_cores,
        round_trip=costs.loopback if options.cores else options.round_trip,
    )
    outcome = simulated(work, fleet, costs.dispatch.of_run(training.steps))
    seconds = training.steps / outcome.rate
    counts = {"chief": 1, "ps": servers, "worker": workers}
    hourly = sum(options.prices.get(role, 0.0) * count for role, count in counts.items())
    return Plan(
        workers=workers,
        servers=servers,
        rate=outcome.rate,
        examples=outcome.rate * training.pull_every * training.step_examples,
        seconds=seconds,
        limit=outcome.limit,
        memory=_memory(costs, calibration, held, is_copied=config.cluster.snapshot_seconds > 0),
        cost=hourly * seconds / 3600,
    )


def _memory(
    costs: Costs, calibration: Mapping[str, Any], held: Sequence[int], *, is_copied: bool
) -> dict[str, int]:
    size, slots = calibration["bytes"], calibration["slots"]
    part = max(held)
    holds = {"chief": size + slots, "ps": part + slots * part / max(1, size), "worker": size}
    if is_copied:
        # Each server has the variables of another one too; those of a single one, the chief. While
        # they are copied, it has them twice: of the models that are measured all are copied whole.
        task = "ps" if sum(map(bool, held)) > 1 else "chief"
        holds[task] *= 3
    found = {role: base + each * holds[role] for role, (base, each) in costs.memory.items()}
    # Activations, and copies of the model.
    found["worker"] = found.get("worker", 0.0) + calibration["step_bytes"]
    return {role: int(each) for role, each in found.items()}


def as_tree(plans: Plans) -> dict[str, Any]:
    """Return what `--json` adds."""
    return {
        "plans": [asdict(each) for each in plans.plans],
        "configured": asdict(plans.configured),
        "proposed": asdict(plans.proposed),
        "calibration": dict(plans.calibration),
    }
