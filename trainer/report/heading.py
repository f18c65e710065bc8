"""Builds the top of the report: what ran, why it failed, what to do next, how to use the model.

The report, `flotilla models show` and the documentation show Python programs that call the model. A
program is derived from the model's manifest, and its examples are in `request.json`.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any
from urllib.parse import unquote, urlsplit

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.program import count_tasks, describe_program, own_roles
from flotilla.trainer.events.progress import duration, time_at_work
from flotilla.trainer.features.length import examples_of_step, format_epochs, is_resolved
from flotilla.trainer.report.charts import number
from flotilla.trainer.report.headline import CONSTANT, IDENTITY
from flotilla.trainer.report.views import list_spans
from flotilla.trainer.report.wording import format_value
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.json_records import make_time

Facts = Mapping[str, Any]

_FRAME = re.compile(r'^  File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<function>.+)$')
# Frames in these folders are not the user's code, even if the user's code called them.
_NOT_HIS = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen", "<string>")
_OURS = re.compile(r"(^|/)(trainer|components|pipelines)/[\w/]+\.py$")
_WHOLE = 100
_LONGEST_VERSION = 12


def clock(seconds: object, form: str = "%Y-%m-%d %H:%M:%S UTC") -> str:
    """Format a Unix timestamp as a UTC date and time."""
    found = make_time(seconds)
    return found.strftime(form) if found else format_value(seconds)


def particulars(facts: Facts) -> list[tuple[str, str]]:
    """Return the known properties of a run, such as date, duration, model, dataset and speed."""
    config, steps = facts.get("config") or {}, facts.get("steps") or ()
    spans = list_spans(facts.get("tries") or ())
    rows = [("Run", str(facts.get("run_id") or ""))]
    if spans:
        rows.append(("Date", clock(min(began for _, began, _ in spans), "%Y-%m-%d %H:%M UTC")))
        rows.append(("Duration", duration(time_at_work(spans))))
    if config:
        rows += [("Model", _model(config, facts)), ("Dataset", _dataset(config, steps))]
        rows.append(("Strategy", _strategy(config)))
    history = facts.get("history") or ()
    rows.append(("Length", _length(history)))
    if speed := examples_a_second(history, config):
        rows.append(("Speed", f"{_three(speed)} examples/s"))
    return [(name, text) for name, text in rows if text]


def examples_a_second(history: Sequence[Facts], config: Facts) -> float:
    """Return the median number of examples per second, or 0 if unknown."""
    speeds = [number(row.get("steps_per_second")) for row in history]
    known = [each for each in speeds if each]
    each_step = _examples_of_a_step(history) or _count_configured_examples(config)
    return statistics.median(known) * each_step if known else 0.0


def cause(steps: Sequence[Facts]) -> dict[str, str]:
    """Return the failed step with its error and, if known, the location in the user's code."""
    bad = [each for each in steps if each.get("status") == "failed" and each.get("error")]
    if not bad:
        return {}
    step = bad[0]
    place = find_place(str(step.get("traceback") or ""))
    return {"step": str(step.get("step") or ""), "error": str(step["error"]), **place}


def find_place(traceback: str) -> dict[str, str]:
    """Return the location of the innermost frame of the user's code, or {} if there is none."""
    lines = traceback.splitlines()
    found: dict[str, str] = {}
    for at, line in enumerate(lines):
        frame = _FRAME.match(line)
        if not frame or any(mark in frame["file"] for mark in _NOT_HIS):
            continue
        if _OURS.search(frame["file"]):
            continue
        following = lines[at + 1].strip() if at + 1 < len(lines) else ""
        source = "" if _FRAME.match(f"  {following}") else following
        found = {**frame.groupdict(), "source": source}
    return found


def commands(facts: Facts, broken: Sequence[Facts] = ()) -> list[dict[str, str]]:
    """Return the suggested commands after a failure or a refusal, each as `why` and `command`.

    `broken` lists the rules that refused the model.
    """
    verdict, run_id = facts.get("verdict"), str(facts.get("run_id") or "")
    if not run_id or verdict not in ("failed", "interrupted", "refused"):
        return []
    is_refused = verdict == "refused"
    found = _after_refusal(facts, run_id, broken) if is_refused else _after_failure(facts, run_id)
    return [{"why": why, "command": shlex.join(words)} for why, words in found]


def _after_failure(facts: Facts, run_id: str) -> Iterator[tuple[str, list[str]]]:
    where, steps = _workdir(facts), facts.get("steps") or ()
    if bad := [str(each.get("step")) for each in steps if each.get("status") == "failed"]:
        replay = ["flotilla", "replay", *where, run_id, bad[0], "--pdb"]
        yield "Reproduce the failure on this machine, in a debugger", replay
    if facts.get("workdir") and (facts.get("history") or facts.get("checkpoints")):
        fix = "Fix it, then continue" if facts.get("verdict") == "failed" else "Resume"
        resume = ["flotilla", "run", *where, "--resume", run_id]
        yield f"{fix} from the last checkpoint", resume


def _after_refusal(
    facts: Facts, run_id: str, broken: Sequence[Facts]
) -> Iterator[tuple[str, list[str]]]:
    where, workdir = _workdir(facts), str(facts.get("workdir") or "")
    config = f"{workdir}/{run_id}/config.json" if workdir else "CONFIG"
    name = str((facts.get("config") or {}).get("name") or "")
    run = ["flotilla", "run", *where, config]
    if (facts.get("validation") or {}).get("decision") == "refused":
        yield "Fix the data, or change the rules of the data gate, and run again", run
        return
    if any(each.get("metric") in IDENTITY for each in broken):
        another = [*run, "--set", f"name={name or 'model'}-2"]
        yield "If it is a different model, give it another name", another
        return
    if any(each.get("key") == CONSTANT for each in broken):
        check = ["flotilla", "check", config]
        yield "Check whether the inputs have any relation to the label", check
    sweep = ["flotilla", "sweep", *where, config, "--auto", "--minutes", "10"]
    yield "Search for better settings, and promote the best", sweep
    if name and (facts.get("evaluation") or {}).get("champion"):
        show = ["flotilla", "models", "show", *where, name]
        yield "Show the champion that the model has to match", show


def use(facts: Facts) -> dict[str, Any]:
    """Return how to use the model of a run: its name and commands, or {} without a model."""
    registered, artifacts = facts.get("registered") or {}, facts.get("artifacts") or {}
    uri = str(registered.get("model") or artifacts.get("model") or "")
    if not uri:
        return {}
    name = str((facts.get("config") or {}).get("name") or "")
    version = registered.get("version")
    model = f"{name}@{version}" if name and version else uri
    predict = ["flotilla", "predict", *_workdir(facts), model, "FILE"]
    folder = href(uri) and unquote(urlsplit(uri).path)
    return {
        "model": model,
        "uri": uri,
        "predict": shlex.join(predict),
        "python": "\n\n\n".join(programs(folder or "model", facts.get("model") or {}).values()),
        "copied": "" if folder else f"Copy {uri} to the folder `model` first.",
    }


def href(uri: object) -> str:
    """Return the URI of a local file. For any other URI, which may be malicious, return ""."""
    text = str(uri)
    return text if text.startswith("file:///") and not re.search(r"[\s\"'<>\\]", text) else ""


def _workdir(facts: Facts) -> list[str]:
    folder = str(facts.get("workdir") or "")
    return ["--workdir", folder] if folder else []


def _model(config: Facts, facts: Facts) -> str:
    name = config.get("name")
    # Show the command of a training program, because the name of its model is unknown.
    kind = describe_program(config) or (config.get("model") or {}).get("name")
    version = (facts.get("registered") or {}).get("version")
    text = " ".join(str(each) for each in (name, f"version {version}" if version else "") if each)
    return f"{text} ({kind})" if kind else text


def _dataset(config: Facts, steps: Sequence[Facts]) -> str:
    data = config.get("data") or {}
    made = next((each.get("metrics") for each in steps if each.get("output") == "dataset"), None)
    counts = made if isinstance(made, Mapping) else {}
    version = str(counts.get("version") or "")
    # Shorten the version: for files it is a digest, which the table of steps shows in full.
    parts = (data.get("source") or data.get("dataset"), version[:_LONGEST_VERSION])
    name = " ".join(str(each) for each in parts if each)
    known = [
        f"{counts[split]:,} {split}"
        for split in ("train", "validation", "test")
        if isinstance(counts.get(split), int)
    ]
    return f"{name}: {', '.join(known)}" if known else name


def _strategy(config: Facts) -> str:
    name = str((config.get("training") or {}).get("strategy") or "").replace("_", " ")
    try:
        roles = count_tasks(config)
    except (KeyError, ValueError, TypeError, AttributeError):
        return name
    own = bool(own_roles(config))
    words = {**({"chief": "chief"} if own else {}), "ps": "parameter server", "worker": "worker"}
    tasks = [
        f"{roles[role]} {word}{'s' if roles[role] != 1 else ''}"
        for role, word in words.items()
        if role in roles
    ]
    return ", ".join(tasks if own else [name, *tasks])


def _examples_of_a_step(history: Sequence[Facts]) -> float:
    """Return the number of examples per global step, from the workers' counts, or 0 if unknown."""
    sums = [(number(row.get("global_step")), _sum_counts(row.get("workers"))) for row in history]
    known = [(step, count) for step, count in sums if step is not None and count]
    # Skip pairs in which a count or a step decreases, because each attempt counts from 0.
    ratios = [
        (later[1] - sooner[1]) / (later[0] - sooner[0])
        for sooner, later in pairwise(known)
        if later[0] > sooner[0] and later[1] > sooner[1]
    ]
    return statistics.median(ratios) if ratios else 0.0


def _sum_counts(workers: object) -> float:
    rows = workers.values() if isinstance(workers, Mapping) else ()
    each = [row.get("examples") for row in rows if isinstance(row, Mapping)]
    return sum(found for one in each if (found := number(one)) is not None)


def _count_configured_examples(config: Facts) -> float:
    # Return 0 if the configuration is not valid in this version, or if a user's training program
    # defines the batch size.
    with suppress(UserError):
        found = parse_config(config)
        if "training" in config and is_resolved(found) and not found.program.command:
            return float(examples_of_step(found))
    return 0.0


def steps_of_epoch(last: Facts) -> str:
    """Return the number of steps per epoch, from the last row of the history, or "" if unknown."""
    step, epoch = number(last.get("global_step")), number(last.get("epoch"))
    return _three(step / epoch) if step and epoch else ""


def _length(history: Sequence[Facts]) -> str:
    last = history[-1] if history else {}
    step, epoch = number(last.get("global_step")), number(last.get("epoch"))
    steps = f"{step:,.0f} steps" if step else ""
    return f"{steps}, {format_epochs(epoch)}" if steps and epoch else steps


def _three(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.0f}" if value >= _WHOLE else f"{value:.3g}"


_BEGIN = """import json

{imports}

folder = {folder}
manifest = json.load(open(f"{{folder}}/MANIFEST.json"))
rows = json.load(open(f"{{folder}}/request.json"))["instances"]
types = {{each["name"]: each["dtype"].replace("string", "object") for each in manifest["inputs"]}}
given = {{name: np.array([row[name] for row in rows], types[name]) for name in types}}
"""
_KERAS = """model = keras.models.load_model(f"{{folder}}/model.keras", compile=False)
outputs = model.predict({inputs}, verbose=0)
answers = {answers}
print(answers)"""
_SAVED_MODEL = """model = tf.saved_model.load(f"{folder}/{manifest['saved_model']}")
serve = model.signatures["serving_default"]
answers = serve(**{name: tf.constant(values) for name, values in given.items()})
print(answers)"""
_SEVERAL = '{each["feature"]: given[each["name"]] for each in manifest["inputs"]}'


def programs(folder: str, fields: Mapping[str, Any]) -> dict[str, str]:
    """Return a program for each library that can load the model in `folder`, keyed by library.

    `fields` are the fields of the model's manifest. A model of an earlier version has no program
    for Keras.
    """
    found = {}
    links, inputs = fields.get("links"), list(fields.get("inputs") or [])
    if isinstance(links, Mapping) and "keras" in (fields.get("formats") or ()):
        modules = sorted(map(str, fields.get("keras_modules") or ()))
        lines = ["import keras", "import numpy as np"]
        lines += [f"import {each}  # has layers of the model" for each in modules]
        one = f"given[{_text(inputs[0]['name'])}]" if len(inputs) == 1 else _SEVERAL
        by_output = {name: _answer(links[name], name) for name in links}
        joined = ", ".join(f"{_text(name)}: {each}" for name, each in by_output.items())
        answers = by_output.get("", f"{{{joined}}}")
        begin = _BEGIN.format(imports="\n".join(lines), folder=_text(folder))
        found["Keras"] = begin + _KERAS.format(inputs=one, answers=answers)
    if fields.get("saved_model"):
        lines = ["import numpy as np", "import tensorflow as tf"]
        begin = _BEGIN.format(imports="\n".join(lines), folder=_text(folder))
        found["SavedModel"] = begin + _SAVED_MODEL
    return found


def _answer(link: Any, name: str) -> str:
    """Return a Python expression that converts an output to probabilities or label units."""
    output = f"outputs[{_text(name)}]" if name else "outputs"
    if isinstance(link, list):
        mean, std = map(float, link)
        return f"{output} * {std!r} + {mean!r}"
    if link == "first":
        return f"keras.ops.sigmoid({output}[:, :1])"
    return f"keras.ops.{link}({output})" if link in {"softmax", "sigmoid"} else output


def _text(value: Any) -> str:
    """Return a Python literal in double quotes."""
    return json.dumps(str(value), ensure_ascii=False)
