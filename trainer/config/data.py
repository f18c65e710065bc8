"""The `data` section: the source of the examples, their columns and splits, and the data gate.

A dataset comes either from TFDS (`dataset`) or from files (`source`). All other keys apply to both,
unless their description says otherwise.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from flotilla.trainer.config.base import Free, Section, Whole, key, suggest

REFUSE, WARN, OFF = "refuse", "warn", "off"
#: All spans or, as a key in `data.gate.rules`, all rules that are not listed there.
ALL = "all"
RULES = {
    "missing_feature": (REFUSE, "a missing feature that the schema file requires or the "
    "champion's dataset has"),
    "new_feature": (WARN, "a feature that the champion's dataset does not have"),
    "type": (REFUSE, "a feature with another type than in the schema file, or another type or "
    "shape than in the champion's dataset"),
    "schema": (REFUSE, "a value, or a share of missing values, that the schema file does not "
    "allow"),
    "empty": (REFUSE, "a training or test split without examples, or a feature without values in "
    "one of them"),
    "size": (WARN, "far fewer examples than in the champion's dataset"),
    "range": (WARN, "numbers outside the range of the champion's dataset"),
    "unit": (REFUSE, "numbers in another unit than in the champion's dataset"),
    "missing_values": (WARN, "more missing values than in the champion's dataset"),
    "constant": (WARN, "a feature with the same value in all training examples"),
    "new_values": (WARN, "categories that the champion's dataset does not have"),
    "new_class": (WARN, "a class of a label that the champion's dataset does not have"),
    "class_gone": (REFUSE, "a class of a label that is missing from a split, or is the only class "
    "in it"),
    "balance": (WARN, "a label whose class shares differ from those in the champion's dataset"),
    "imbalance": (WARN, "a class that is too rare to affect accuracy noticeably"),
    "duplicates": (WARN, "more examples with the same inputs within a split than expected"),
    "leakage": (REFUSE, "more examples that occur in two splits than expected by chance"),
    "label_leakage": (WARN, "an input that alone determines a label"),
    "association": (REFUSE, "a label that depends far less on the inputs than in the champion's "
    "dataset, or far less in the test split than in training"),
    "drift": (WARN, "a feature with another distribution than in the champion's dataset"),
    "drift_together": (WARN, "small drifts of many numeric features that chance does not explain"),
    "splits_differ": (WARN, "a feature with another distribution in the test split than in "
    "training"),
}  # fmt: skip
#: Each limit with its default, minimum, maximum and meaning.
LIMITS = {
    "size": (0.5, 0.0, 1.0, "minimum number of examples, as a share of the number in the "
    "champion's dataset"),
    "missing_values": (0.05, 0.0, 1.0, "maximum increase in the share of missing values"),
    "range": (0.002, 0.0, 1.0, "maximum share of values below the champion's range, or above it"),
    "new_values": (0.005, 0.0, 1.0, "maximum share of examples with a new value, in excess of the "
    "share expected by chance"),
    "balance": (0.05, 0.0, 1.0, "maximum total variation distance between the class shares"),
    "imbalance": (0.1, 0.0, 1.0, "minimum size of a class, relative to its size if all classes "
    "were equally large"),
    "duplicates": (0.01, 0.0, 1.0, "maximum share of duplicates within a split, in excess of the "
    "expected share"),
    "leakage": (0.005, 0.0, 1.0, "maximum share of a split's examples that are also in another "
    "split, in excess of the share expected by chance"),
    "label_leakage": (0.995, 0.5, 1.0, "minimum accuracy of predicting a class from the input, "
    "with all classes weighted equally; for a number, 1 minus the maximum relative error"),
    "drift": (0.1, 0.0, 1.0, "minimum distance between two distributions that is reported: "
    "Kolmogorov-Smirnov for numbers, total variation for categories"),
    "drift_together": (0.015, 0.0, 1.0, "minimum root mean square of P(new > old) - 1/2, over the "
    "numeric features, that is reported"),
    "significance": (0.0002, 1e-12, 0.1, "significance level of each rule for one dataset: a "
    "difference is reported only if its p-value is smaller"),
}  # fmt: skip


class DataGateConfig(Whole):
    """The data gate: the action of each rule, and the limits."""

    rules: dict[str, Literal["refuse", "warn", "off"]] = key(
        {},
        f"action of each rule: {{rule: refuse | warn | off}}; the name {ALL} stands for every rule "
        "that is not listed",
    )
    limits: dict[str, float] = key({}, "limits that differ from the defaults: {limit: value}")

    @field_validator("rules", mode="before")
    @classmethod
    def _words_of_yaml(cls, value: Any) -> Any:
        # YAML reads an unquoted `off` as false.
        if isinstance(value, dict):
            return {name: OFF if word is False else word for name, word in value.items()}
        return value

    @field_validator("rules")
    @classmethod
    def _check_rules(cls, rules: dict[str, str]) -> dict[str, str]:
        for name in rules:
            if name != ALL and name not in RULES:
                raise ValueError(f"{name!r} is not a rule{suggest(name, RULES)}")
        return rules

    @field_validator("limits")
    @classmethod
    def _check_limits(cls, limits: dict[str, float]) -> dict[str, float]:
        for name, value in limits.items():
            if name not in LIMITS:
                raise ValueError(f"{name!r} is not a limit{suggest(name, LIMITS)}")
            _, least, most, _ = LIMITS[name]
            if not least <= value <= most:
                raise ValueError(f"{name}: {value:g} is not between {least:g} and {most:g}")
        return limits

    def action(self, rule: str) -> str:
        """Return the action of a rule: refuse, warn or off."""
        return self.rules.get(rule) or self.rules.get(ALL) or RULES[rule][0]

    def limit(self, name: str) -> float:
        """Return the value of a limit."""
        return self.limits.get(name, LIMITS[name][0])


DEFAULT_DATASET = "digits"
_IMAGES = (
    ".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".gif", ".bmp", ".dib", ".webp", ".tif", ".tiff",
    ".apng", ".mpo", ".avif", ".jp2", ".j2k", ".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".ico",
)  # fmt: skip
#: Each format of source files, and the file extensions by which it is detected.
FORMATS: dict[str, tuple[str, ...]] = {
    "csv": (".csv", ".tsv", ".txt"),
    "parquet": (".parquet", ".pq"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "tfrecord": (".tfrecord", ".tfrecords"),
    "npz": (".npz",),
    "images": _IMAGES,
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".br", ".snappy")
_SUFFIXES = frozenset([*_COMPRESSED, *(each for some in FORMATS.values() for each in some)])
_PATTERN = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[*?]+")
# The maximum length of a name that, with a digest, fits into the 50 characters of `Config.name`.
_NAME_LETTERS = 43
#: Types for numbers as people write them, with a decimal point or with a decimal comma.
NUMBERS_IN_WRITING = ("number", "number_comma")
TYPES = ("int", "float", *NUMBERS_IN_WRITING, "bool", "text", "class", "time", "image")
DYNAMIC = "dynamic"
NEWEST, SINCE_CHAMPION = "newest", "since_champion"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_FLAG = re.compile(r"--[A-Za-z]\w*(=.+)?")
_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)(i?)B?")


def parse_size(text: str) -> int:
    """Return the bytes in a size such as 300MB (10^6) or 2GiB (2^30). Raises `ValueError`."""
    found = _BYTES.fullmatch(text.strip())
    if not found or (found[3] and not found[2]):
        raise ValueError(f"{text!r} is not a size; write it as 300MB or 2GiB")
    unit = 1024 ** list(_UNITS).index(found[2]) if found[3] else _UNITS[found[2]]
    return int(float(found[1]) * unit)


def registry_name(source: str) -> str:
    """Return the default model name for files: `my-churn-2024` for `My Churn (2024).csv`.

    For a pattern, the name comes from the last part of the path that contains more than wildcards.
    """
    place = re.split(r"\?(?=\w+=)", source)[0]
    parts = re.split(r"[/\\]+", place.partition("://")[2] or place)
    last = next(filter(None, map(_strip_ending, reversed(parts))), "")
    letters = unicodedata.normalize("NFKD", last.lower())
    ascii_ = "".join(each for each in letters if not unicodedata.combining(each))
    name = re.sub(r"[^a-z0-9._]+", "-", ascii_)[:_NAME_LETTERS].strip("._-")
    # Letters of other scripts are lost, so add a digest: the name must not be empty, and different
    # sources need different names.
    is_lost = any(each.isalnum() and not each.isascii() for each in ascii_)
    digest = hashlib.sha256(last.encode(errors="surrogatepass")).hexdigest()[:6]
    return f"{name or 'model'}-{digest}" if is_lost or not name else name


def _strip_ending(part: str) -> str:
    name = _PATTERN.sub(" ", part).strip()
    while (ending := re.search(r"\.[A-Za-z0-9]+$", name)) and ending[0].lower() in _SUFFIXES:
        name = name[: ending.start()].rstrip()
    return name.strip(" ._-")


class ImageConfig(Whole):
    """Settings for decoding images."""

    size: tuple[Annotated[int, Field(ge=1, le=1 << 14)], ...] = key(
        (), "[height, width] to which images are resized", strict=False
    )
    channels: Literal[1, 3, 4] = key(
        3, "number of channels: 1 for grayscale, 3 for RGB, 4 for RGBA"
    )

    @field_validator("size")
    @classmethod
    def _two_sides(cls, size: tuple[int, ...]) -> tuple[int, ...]:
        if len(size) not in (0, len(("height", "width"))):
            raise ValueError("write it as [height, width]")
        return size

    @model_validator(mode="after")
    def _require_size(self) -> ImageConfig:
        if self.channels != len("RGB") and not self.size:
            raise ValueError("size: required unless channels is 3; set [height, width]")
        return self


class SplitsConfig(Whole):
    """The training, validation and test splits of examples from files.

    `train`, `validation` and `test` name separate files, by a path below the source or by a URI.
    `column` contains the split of each row. Otherwise `data.validation` and `test` are shares of
    the examples. With `time`, they are the latest examples. Otherwise they are drawn at random, in
    whole groups if `group` is set.
    """

    train: str = key("", "files of the training split: a path below the source, or a URI")
    validation: str = key("", "files of the validation split")
    test: str | float = key(
        0.0,
        "files of the test split, or its share of the examples (below 1); 0: as large as the "
        "validation split",
    )
    column: str = key("", "column that names the split of each row: train, validation or test")
    group: str = key(
        "", "column; rows with the same value in it stay in one split; empty: data.group"
    )
    time: str = key(
        "", "column with the time of each row: latest rows for testing, the next for validation"
    )

    @field_validator("test")
    @classmethod
    def _share(cls, value: str | float) -> str | float:
        if not isinstance(value, str) and not 0 <= value < 1:
            raise ValueError(
                f"{value:g} is not a share; write a path, or a number of at least 0 and below 1"
            )
        return value

    @model_validator(mode="after")
    def _one_way(self) -> SplitsConfig:
        named = [name for name in ("train", "validation", "test") if self.is_named(name)]
        drawn = [name for name in ("group", "time") if getattr(self, name)]
        if self.column and (named or drawn):
            raise ValueError(
                f"column: it assigns every row to a split; leave out {', '.join([*named, *drawn])}"
            )
        if named and not self.train:
            raise ValueError(f"{named[0]} is given as files; set train to the training files too")
        if len(drawn) > 1:
            raise ValueError(
                "group: a split cannot be drawn both by group and by time; leave one of them out"
            )
        return self

    def is_named(self, split: str) -> bool:
        """Return whether a split has separate files."""
        value = getattr(self, split)
        return isinstance(value, str) and bool(value)


class RunnerConfig(Whole):
    """Settings for preparing a dataset."""

    name: Literal["processes", "beam"] = key(
        "processes",
        "how data is prepared: in processes on this machine, or with Apache Beam (needs the extra "
        "`beam`)",
    )
    processes: int = key(0, "number of processes; 0: one per core", ge=0, le=1024)
    options: tuple[str, ...] = key(
        (), "options of a Beam pipeline, such as --runner=FlinkRunner", strict=False
    )

    @field_validator("options")
    @classmethod
    def _flags(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            if not _FLAG.fullmatch(each):
                raise ValueError(f"the option {each!r} does not have the form --name=value")
        return value

    @model_validator(mode="after")
    def _options_of_beam(self) -> RunnerConfig:
        if self.options and self.name != "beam":
            raise ValueError(
                "options: they apply only to Beam; set name to beam, or leave them out"
            )
        return self


class DataConfig(Section):
    """The dataset, its splits and its shards."""

    dataset: str = key(
        DEFAULT_DATASET, "name of a TFDS dataset, or package.module:Builder; excludes data.source"
    )
    source: str = key(
        "", "files to read instead of a TFDS dataset: a path, a folder, a URI or a pattern"
    )
    format: Literal["", "csv", "parquet", "jsonl", "tfrecord", "npz", "images"] = key(
        "", "format of the files of data.source; empty: detected from their names"
    )
    builder_args: Free = key({}, "keyword arguments for the TFDS builder")
    version: str = key("", "version of the TFDS dataset; empty: the newest")
    spans: str = key(
        NEWEST,
        f"spans to read if data.source has {{SPAN}} or {{DATE}}: {NEWEST}, a number N (the newest "
        f"N), {ALL}, or {SINCE_CHAMPION} (those that the champion was not trained on)",
    )
    manual_dir: str = key(
        "", "folder with the original files of a TFDS dataset, for machines without network access"
    )
    inputs: tuple[str, ...] = key(
        (), "input features of the model; empty: the inputs of the dataset", strict=False
    )
    label: tuple[str, ...] = key(
        (), "features to predict; empty: the label of the dataset", strict=False
    )
    weight: str = key("", "feature with the weight of each example in the loss and the metrics")
    group: str = key("", "feature that identifies the group of an example, such as its query")
    drop: tuple[str, ...] = key((), "columns of a source to ignore", strict=False)
    types: dict[str, Literal[*TYPES]] = key(  # type: ignore[valid-type]
        {}, f"column types, where the inferred ones are wrong: {', '.join(TYPES)}"
    )
    map: str = key("", "package.module:function that turns a row of a source into an example")
    shapes: dict[str, tuple[Annotated[int, Field(ge=0)], ...]] = key(
        {},
        "shape to which the examples of a feature are resized (images) or padded; a first size of "
        "0: pad to the longest example in the batch",
    )
    buckets: tuple[Annotated[int, Field(ge=1)], ...] = key(
        (), "boundaries of length buckets; a batch has examples of a single bucket", strict=False
    )
    image: ImageConfig = key(ImageConfig(), "image decoding: {size: [height, width], channels}")
    bad_rows: float = key(
        0.0, "maximum share of rows skipped as broken; 0: fail on the first broken row", ge=0, lt=1
    )
    splits: SplitsConfig = key(
        SplitsConfig(), "splits of a source: {train, validation, test, column, group, time}"
    )
    shards: int = key(8, "number of shards of the training split", ge=1, le=100_000)
    validation: float = key(
        0.1, "training examples to use for validation: a share below 1, or a count; 0: none", ge=0
    )
    partition: Literal["disjoint", "dynamic", "reshuffle"] = key(
        "disjoint",
        "disjoint: each worker reads its own shards; dynamic: each range of examples goes to the "
        "next free worker; reshuffle: each worker reads all data",
    )
    disk: str = key("", "maximum total size of a worker's shards on its disk; empty: no limit")
    vocabulary: int = key(
        10_000, "maximum number of distinct values to record for a text feature", ge=1, le=10**7
    )
    runner: RunnerConfig = key(RunnerConfig(), "how data is prepared: {name, processes, options}")
    schema_file: str = key(
        "", "path or URI of a YAML file with a schema; data.gate checks the features against it"
    )
    gate: DataGateConfig = key(
        DataGateConfig(), "checks of a dataset before training: {rules, limits}"
    )
    seed: int = key(
        0, "random seed for splitting the dataset and for shuffling examples", ge=0, lt=2**31
    )

    @model_validator(mode="after")
    def _either(self) -> DataConfig:
        """Allow a source with the default dataset, so that a run need not unset the dataset."""
        if self.source and self.dataset not in ("", DEFAULT_DATASET):
            raise ValueError(
                f"source and dataset ({self.dataset!r}) are both set; leave one of them empty"
            )
        if self.buckets and self.partition == "dynamic":
            raise ValueError(
                "buckets: they group examples by length, but partition: dynamic assigns "
                "examples by number; leave buckets out, or set partition to disjoint"
            )
        if not self.dataset and not self.source:
            raise ValueError("neither dataset nor source is set; give a TFDS dataset or files")
        return self

    @property
    def is_own(self) -> bool:
        """Whether the user's code prepares the data, with a builder or a function for rows."""
        return bool(self.map) or (":" in self.dataset and not self.source)

    @property
    def name(self) -> str:
        """The dataset or the source, for messages."""
        return self.source or self.dataset

    @field_validator("inputs", "label", "drop", mode="before")
    @classmethod
    def _one_is_enough(cls, value: Any) -> Any:
        one = isinstance(value, str | bool | int | float)
        return [value] if one and value != "" else [] if value == "" else value

    @field_validator("bad_rows", mode="before")
    @classmethod
    def _fail(cls, value: Any) -> Any:
        return 0.0 if value == "fail" else value

    @field_validator("validation")
    @classmethod
    def _share_or_count(cls, value: float) -> float:
        if value >= 1 and value != int(value):
            raise ValueError("a count of examples must be a whole number")
        return value

    @field_validator("spans", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        return str(value) if type(value) is int else value

    @field_validator("spans")
    @classmethod
    def _check_spans(cls, value: str) -> str:
        if value in (NEWEST, ALL, SINCE_CHAMPION) or re.fullmatch("[1-9][0-9]{0,5}", value):
            return value
        raise ValueError(f"{value!r} is not {NEWEST}, {ALL}, {SINCE_CHAMPION} or a positive number")

    @field_validator("disk")
    @classmethod
    def _size(cls, value: str) -> str:
        if value and parse_size(value) < 1:
            raise ValueError(f"{value!r} is not a size above 0")
        return value

    @field_validator("buckets")
    @classmethod
    def _ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(set(value)):
            raise ValueError("the lengths must be in ascending order")
        return value
