"""Twelve real tables: the best constant, a linear model, boosting, and the default model.

The tables come with packages, of which statsmodels, vega_datasets and palmerpenguins are none of
this project's: install them first. Of each the configuration says the file, the label and the
model, `tabular`; it trains in one process, and is evaluated and judged. `docs/tasks.md` gets the
table, and `build/real_tables.json` keeps what was found.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.tasks import PAGE, ROOT, launched, put
from flotilla.trainer import storage
from flotilla.trainer.checkpoints.decisions import handed_on
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.data.prepare import prepare
from flotilla.trainer.evaluation.evaluate import evaluate
from flotilla.trainer.promotion import gate

Table = Any


def _scikit(name: str) -> Table:
    datasets = importlib.import_module("sklearn.datasets")
    return getattr(datasets, f"load_{name}")(as_frame=True).frame


def _statsmodels(name: str) -> Table:
    return importlib.import_module(f"statsmodels.datasets.{name}").load_pandas().data


def _vega(name: str) -> Table:
    return getattr(importlib.import_module("vega_datasets").data, name)()


def _named(frame: Table, column: str, names: Mapping[Any, str]) -> Table:
    return frame.assign(**{column: frame[column].map(names)})


def _fair() -> Table:
    frame = _statsmodels("fair")
    return frame.assign(affair=frame["affairs"] > 0).drop(columns="affairs")


def _snow() -> Table:
    frame = _vega("seattle_weather")
    return frame.assign(snow=frame["weather"] == "snow").drop(columns=["weather", "date"])


def _many_visits() -> Table:
    frame = _statsmodels("randhie")
    return frame.assign(many=frame["mdvis"] >= 20).drop(columns="mdvis")  # noqa: PLR2004


#: What each table is like, its label, and how it is made.
TABLES: Mapping[str, tuple[str, str, Callable[[], Table]]] = {
    "breast_cancer": ("two classes", "target", lambda: _scikit("breast_cancer")),
    "modechoice": ("two classes", "choice", lambda: _statsmodels("modechoice")),
    "fair": ("two classes", "affair", _fair),
    "snow": ("two classes, one rare", "snow", _snow),
    "many_visits": ("two classes, one rare", "many", _many_visits),
    "wine": ("classes", "target", lambda: _scikit("wine")),
    "digits": ("classes", "target", lambda: _scikit("digits")),
    "penguins": (
        "classes, mixed, missing values",
        "species",
        lambda: importlib.import_module("palmerpenguins").load_penguins(),
    ),
    "seattle_weather": ("classes", "weather", lambda: _vega("seattle_weather")),
    "diabetes": ("numbers", "target", lambda: _scikit("diabetes")),
    "cars": ("numbers, mixed, missing values", "Miles_per_Gallon", lambda: _vega("cars")),
    "visits": ("numbers, skewed", "mdvis", lambda: _statsmodels("randhie")),
}


def run(kept: Path, chosen: list[str]) -> dict[str, dict[str, Any]]:
    """Measure what is not kept yet, or what is chosen; return what was found of each table."""
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    kept.parent.mkdir(exist_ok=True)
    for name in TABLES:
        if name not in found or name in chosen:
            found[name] = measured(name)
            kept.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return found


def measured(name: str) -> dict[str, Any]:
    """Prepare a table, train, evaluate and judge; return what the evaluation and the gate said."""
    _, label, make = TABLES[name]
    with tempfile.TemporaryDirectory(prefix="flotilla-tables-") as folder:
        home, frame = Path(folder), make()
        frame.dropna(subset=[label]).to_csv(home / "table.csv", index=False)
        config = parse_config(
            {
                "data": {
                    "source": str(home / "table.csv"),
                    "label": label,
                    # A count is a quantity here.
                    "types": {label: "float"} if label == "mdvis" else {},
                },
                "model": {"name": "tabular"},
                "training": {"strategy": "single"},
            }
        )
        (home / "scratch").mkdir()
        dataset = prepare(config.data, storage.uri_of(home / "data"), home / "scratch").uri
        checkpoint = handed_on(launched(config, dataset, home), config.training.hand_on).uri
        evaluation, decision = (storage.uri_of(home / each) for each in ("evaluation", "decision"))
        evaluate(config, dataset, checkpoint, evaluation, home / "scratch")
        judged = gate.check(config, evaluation, decision)
        found = json.loads(storage.read_file(evaluation, "metrics.json"))
    kinds = ("main_metric", "examples", "metrics", "constant", "baselines")
    return {
        "rows": len(frame),
        "blessed": judged.blessed,
        "reasons": judged.reasons,
        **{kind: found[kind] for kind in kinds},
    }


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one row for each table."""
    lines = [
        "| table | label | rows, test | metric | constant | linear | boosting | model | verdict |",
        "|" + "---|" * 9,
    ]
    for name, (kind, _, _) in TABLES.items():
        if name in found:
            cells = [f"`{name}`", kind, *_cells(found[name])]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(found: Mapping[str, Any]) -> Iterator[str]:
    main = found["main_metric"]
    yield f"{found['rows']:,}, {found['examples']:,}"
    yield f"`{main}`"
    yield _cell(found["constant"]["metrics"].get(main))
    by_name = {each["name"]: each for each in found["baselines"]}
    for name in ("linear", "gradient boosting"):
        yield _cell(by_name[name]["metrics"].get(main)) if name in by_name else ""
    yield _cell(found["metrics"].get(main))
    better = [name for name, each in by_name.items() if each["beats"]]
    verdict = "blessed" if found["blessed"] else "refused"
    yield "; ".join([verdict, *(f"{name} is better" for name in better)])


def _cell(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.3g}"


def main() -> None:
    """Run all tables that are not kept, or those that are named, and write the page."""
    found = run(ROOT / "build" / "real_tables.json", sys.argv[1:])
    put(ROOT / PAGE, "tables", table(found))


if __name__ == "__main__":
    main()
