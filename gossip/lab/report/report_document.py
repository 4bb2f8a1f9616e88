"""The result document of a sweep, validated and typed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossip.lab.report.report_fields import Field

METHODS = ("gossip", "ddp", "local")
STATUSES = ("completed", "partly failed", "failed")
METRICS = ("accuracy", "loss")
#: The key of the cluster under which a sentence describes it.
DESCRIPTION = "description"


@dataclass(frozen=True)
class Value:
    """A result, aggregated over the seeds.

    Attributes
    ----------
    mean, spread, count
        Mean, sample standard deviation (None for one seed) and number of seeds.
    interval
        The 95 % confidence interval of the mean, if known.
    """

    mean: float
    spread: float | None
    count: int
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Bar:
    """The threshold that a row should reach in comparison with all-reduce, and whether it did; None if not known."""

    bar: float
    met: bool | None


@dataclass(frozen=True)
class Trial:
    """A tuning trial: the value, the final accuracy and loss of the averaged model, and the reason of a failure."""

    value: float
    accuracy: float | None
    loss: float | None
    reason: str

    @property
    def text(self) -> str:
        """The trial in words."""
        if self.reason:
            return f"{self.value:g}: {self.reason}"
        accuracy, loss = ("not finite" if what is None else f"{what:.4f}" for what in (self.accuracy, self.loss))
        return f"{self.value:g}: accuracy {accuracy}, loss {loss}"


@dataclass(frozen=True)
class Tuning:
    """The value of a parameter with which a row was run, chosen among trials with a separate seed."""

    parameter: str
    seed: int
    value: float | None
    is_at_end: bool
    trials: tuple[Trial, ...]

    @property
    def text(self) -> str:
        """The value, and whether it is at the end of the grid; a dash if there is none."""
        if self.value is None:
            return "-"
        return f"{self.value:g}, at the end of the grid" if self.is_at_end else f"{self.value:g}"


@dataclass(frozen=True)
class Curves:
    """The measurements during training, as means over the seeds; all sequences have the same length.

    Attributes
    ----------
    step
        The number of local updates so far.
    bytes, time_s
        The bytes sent per rank and the predicted time so far.
    metric
        The metric of the averaged model on held-out data.
    consensus, consensus_absolute
        The consensus distance, relative to the mean and absolute; the latter is all None in older documents.
    """

    step: tuple[float | None, ...]
    bytes: tuple[float | None, ...]
    time_s: tuple[float | None, ...]
    metric: tuple[float | None, ...]
    consensus: tuple[float | None, ...]
    consensus_absolute: tuple[float | None, ...]


@dataclass(frozen=True)
class Row:
    """One setting of the sweep, over its seeds. Fields that do not apply to the method are None.

    Rows are compared with others of the same number of ranks, partition and condition. The condition states the other
    varied options that apply to all-reduce too, such as ``data=digits``; None if there are none.
    """

    label: str
    method: str
    topology: str | None
    world_size: int
    partition: str | None
    condition: str | None
    algorithm: str | None
    compression: str | None
    engine: str | None
    seeds: tuple[int, ...]
    num_failed: int
    status: str
    reasons: tuple[str, ...]
    commands: tuple[str, ...]
    values: Mapping[str, Value | None]
    bars: Mapping[str, Bar]
    tuning: Tuning | None
    curves: Curves | None

    @property
    def verdict(self) -> str:
        """Whether the row has met its bars, in words; empty without any."""
        missed = [name for name, bar in self.bars.items() if bar.met is False]
        if missed:
            return f"not met: {', '.join(missed)}"
        unknown = [name for name, bar in self.bars.items() if bar.met is None]
        return f"not known: {', '.join(unknown)}" if unknown else "met" if self.bars else ""

    def mean(self, name: str) -> float | None:
        """Return the mean of a value; None if there is none."""
        value = self.values.get(name)
        return None if value is None else value.mean


@dataclass(frozen=True)
class Metric:
    """The metric of the comparison: ``accuracy`` or ``loss`` of the averaged model, and the target to reach."""

    name: str
    higher_is_better: bool
    target: float | None


@dataclass(frozen=True)
class Document:
    """The results of a sweep.

    ``settings``, ``cluster`` and ``environment`` map names to text; ``drawings`` maps titles to SVG.
    """

    title: str
    description: str
    settings: Mapping[str, str]
    metric: Metric
    cluster: Mapping[str, str]
    environment: Mapping[str, str]
    rows: tuple[Row, ...]
    drawings: Mapping[str, str]


def read_document(document: Mapping[str, Any]) -> Document:
    """Validate a document with the content of results.json, and convert it.

    Raises
    ------
    ValueError
        If a field is missing or invalid; the message names its place and its value.
    """
    whole = Field(document, "document")
    metric = whole["metric"]
    return Document(
        title=whole["title"].text(),
        description=whole.get("description").optional_text() or "",
        settings=whole.get("settings").texts(),
        metric=Metric(
            metric["name"].one_of(METRICS), metric["higher_is_better"].boolean(), metric.get("target").optional_number()
        ),
        cluster=whole.get("cluster").texts(),
        environment=whole.get("environment").texts(),
        rows=tuple(_row(row) for row in whole["rows"].items()),
        drawings={title: drawing.svg() for title, drawing in whole.get("drawings").named()},
    )


def _row(row: Field) -> Row:
    return Row(
        label=row["label"].text(),
        method=row["method"].one_of(METHODS),
        topology=row.get("topology").optional_text(),
        world_size=row["world_size"].integer(minimum=1),
        partition=row.get("partition").optional_text(),
        condition=row.get("condition").optional_text(),
        algorithm=row.get("algorithm").optional_text(),
        compression=row.get("compression").optional_text(),
        engine=row.get("engine").optional_text(),
        seeds=tuple(seed.integer() for seed in row["seeds"].items()),
        num_failed=row["num_failed"].integer(minimum=0),
        status=row["status"].one_of(STATUSES),
        reasons=tuple(reason.text() for reason in row.get("reasons").items()),
        commands=tuple(command.text() for command in row.get("commands").items()),
        values={name: _value(value) for name, value in row["values"].named()},
        bars={name: Bar(bar["bar"].number(), bar["met"].optional_boolean()) for name, bar in row.get("bars").named()},
        tuning=_tuning(row.get("tuning")),
        curves=_curves(row.get("curves")),
    )


def _value(value: Field) -> Value | None:
    if value.is_null:
        return None
    ends = [end.number() for end in value.get("interval").items()]
    if len(ends) not in (0, 2):
        raise ValueError(f"{value.place}.interval must be a lower and an upper end or null, got {ends}")
    return Value(
        value["mean"].number(),
        value.get("spread").optional_number(minimum=0.0),
        value["count"].integer(minimum=1),
        (ends[0], ends[1]) if ends else None,
    )


def _tuning(tuning: Field) -> Tuning | None:
    if tuning.is_null:
        return None
    trials = [
        Trial(
            trial["value"].number(),
            trial["accuracy"].optional_number(),
            trial["loss"].optional_number(),
            trial["reason"].text(),
        )
        for trial in tuning["trials"].items()
    ]
    return Tuning(
        tuning["parameter"].text(),
        tuning["seed"].integer(),
        tuning["value"].optional_number(),
        tuning["is_at_end"].boolean(),
        tuple(trials),
    )


def _curves(curves: Field) -> Curves | None:
    if curves.is_null:
        return None
    names = ("step", "bytes", "time_s", "metric", "consensus")
    lists = {name: tuple(entry.optional_number() for entry in curves[name].items()) for name in names}
    absolute = curves.get("consensus_absolute")
    lists["consensus_absolute"] = tuple(
        [None] * len(lists["step"]) if absolute.is_null else [entry.optional_number() for entry in absolute.items()]
    )
    lengths = {name: len(entries) for name, entries in lists.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{curves.place} must hold lists of one length, got {lengths}; use null for what is missing")
    return Curves(**lists)
