"""What a benchmark is: its settings, what a worker does, what becomes of the records, and how that is reported.

Also summaries of many values, and tables of them in Markdown.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from gossip.lab.benchmarks.bench_methods import MethodSpecification, expand
from gossip.lab.benchmarks.network.shaped_hosts import MAX_HOSTS, Lab, bits_per_second
from gossip.lab.experiments.records import Record as Record
from gossip.lab.experiments.validated_models import Model

Records = Sequence[Sequence[Mapping[str, Any]]]
"""The records of each rank."""
Write = Callable[[Record], None]
S = TypeVar("S", bound="BenchmarkSettings")
R = TypeVar("R", bound=BaseModel)


_TEXTS = BeforeValidator(lambda value: [str(each) for each in (value if isinstance(value, list) else [value])])
Link = Annotated[str, AfterValidator(lambda text: bits_per_second(text) and text)]
Links = Annotated[tuple[Link, ...], Field(min_length=1, strict=False), _TEXTS]
"""Links of the lab as texts for :func:`.shaped_hosts.bits_per_second`; one or a list of them."""


class BenchmarkSettings(Model):
    """The settings that every benchmark has; a case, which one start of the workers measures, has a single link.

    A field with a description is an option of the command line of :mod:`gossip.lab.benchmarks.harness`.
    """

    world_size: int = Field(4, ge=2, description="workers; in the lab each is a host of its own")
    local_size: int = Field(1, ge=1)
    network: Literal["loopback", "lab"] = "loopback"
    links: Links = ("200mbit",)
    last_link: Link | None = None
    far_link: Link | None = None
    num_threads: int = Field(1, ge=1, alias="threads")
    timeout_s: float = Field(120.0, gt=0)

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        if self.world_size % self.local_size:
            raise ValueError(
                f"local_size={self.local_size} does not divide world_size={self.world_size}; every host has as many"
            )
        for name, link in (("last_link", self.last_link), ("far_link", self.far_link)):
            if self.network == "loopback" and link is not None:
                raise ValueError(f"{name}={link}: network=loopback has no links; set network=lab, or leave it out")
        if self.network == "lab" and self.num_hosts > MAX_HOSTS:
            raise ValueError(f"world_size must be at most {MAX_HOSTS} in the lab, got {self.world_size}")
        return self

    @property
    def num_hosts(self) -> int:
        """The number of hosts of the lab."""
        return self.world_size // self.local_size

    @property
    def link(self) -> str | None:
        """The link of a case; None on loopback."""
        return self.links[0] if self.network == "lab" else None

    def make_lab(self) -> Lab:
        """Make the lab of a case, which has one."""
        rates = [None if link is None else bits_per_second(link) for link in (self.link, self.last_link, self.far_link)]
        return Lab(self.num_hosts, *rates)

    def cases(self) -> Iterator[tuple[str, Self]]:
        """Yield the settings of each case, and a name for the folder of its records."""
        for link in self.links if self.network == "lab" else self.links[:1]:
            case = self.model_copy(update={"links": (link,)})
            yield case.link or self.network, case


class ComparisonSettings(BenchmarkSettings):
    """The settings of a benchmark of methods: a mapping for :func:`gossip.lab.benchmarks.bench_methods.expand`."""

    methods: tuple[MethodSpecification, ...]

    @field_validator("methods", mode="before")
    @classmethod
    def _expand(cls, given: Any, info: ValidationInfo) -> Any:
        return expand(given, info.data.get("world_size", 1), info.data.get("local_size", 1))


class Place(NamedTuple):
    """The place of a rank of a case: its number, its network interface, and how many ranks use the same one."""

    rank: int
    interface: str
    num_sharing: int


class Benchmark(ABC, Generic[S, R]):
    """A benchmark. A subclass is one file; :mod:`gossip.lab.benchmarks.harness` runs it.

    ``settings`` is the model of the configuration; ``title`` and ``explanation`` are the heading of the report and its
    last paragraph, ``files`` the names of the files with the results and the report. One that ``resumes`` may be given
    a folder that is there already: what is measured in it of the same settings is not measured again. The work of one
    that ``starts_ranks`` is done by one process outside of the lab, which starts the ranks, and makes the lab itself.
    The command of one that ``takes_ranks`` may be started by torchrun or srun.
    """

    settings: type[S]
    title: ClassVar[str] = ""
    explanation: ClassVar[str] = ""
    files: ClassVar[tuple[str, str]] = ("results.json", "report.md")
    resumes: ClassVar[bool] = False
    starts_ranks: ClassVar[bool] = False
    takes_ranks: ClassVar[bool] = False

    def launch_options(self, case: S) -> dict[str, Any]:  # noqa: ARG002
        """Return arguments of :func:`gossip.launch` besides the number of workers, of threads and the time-out."""
        return {}

    @abstractmethod
    def work(self, case: S, place: Place, write: Write) -> None:
        """Measure on one rank, and write the records. Collective."""

    def progress(self, case: S, number: int, record: Record) -> str | None:  # noqa: ARG002
        """Return a line about the record of rank 0 with this number, counted from 0; None says nothing."""
        return None

    @abstractmethod
    def result(self, case: S, records: Records) -> R:
        """Return the result of a case."""

    def facts(self, settings: S) -> list[str]:  # noqa: ARG002
        """Return sentences about what was measured, for the head of the report."""
        return []

    @abstractmethod
    def sections(self, results: Sequence[R]) -> list[str]:
        """Return the paragraphs and tables of the report."""

    def report(self, settings: S, results: Sequence[R], machine: str) -> str:
        """Return the report as Markdown."""
        facts = "\n".join(f"- {fact}" for fact in (*self.facts(settings), machine))
        parts = [f"# {self.title}", facts, *self.sections(results), self.explanation]
        return "\n\n".join(filter(None, parts)) + "\n"

    def draw(self, settings: S, results: Sequence[R], folder: Path) -> None:
        """Write the figures, and other files that the settings ask for."""

    def is_sound(self, results: Sequence[R]) -> bool:  # noqa: ARG002
        """Return whether the results are as they must be; else the command fails."""
        return True


class Rows(BaseModel):
    """The records of rank 0 in a case, and the link of the case; None on loopback."""

    link: str | None
    rows: list[Record]


class RowsBenchmark(Benchmark[S, Rows]):
    """A benchmark whose report is what rank 0 has written: a table for each link, with a column for each key.

    Rows that have other keys make a table of their own.
    """

    def progress(self, case: S, number: int, record: Record) -> str | None:  # noqa: ARG002
        return ", ".join(self.cells(record))

    def result(self, case: S, records: Records) -> Rows:
        return Rows(link=case.link, rows=[dict(record) for record in records[0]])

    def sections(self, results: Sequence[Rows]) -> list[str]:
        tables: dict[tuple[str | None, tuple[str, ...]], list[list[str]]] = {}
        for result in results:
            for row in result.rows:
                tables.setdefault((result.link, tuple(row)), []).append(self.cells(row))
        parts = []
        for (link, titles), rows in tables.items():
            parts += [f"## {link}" if link else "", table(titles, rows)]
        return parts

    def cells(self, row: Record) -> list[str]:
        """Return the texts of a row of the table."""
        return [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row.values()]


class Spread(BaseModel):
    """A median with a range: quartiles over steps and ranks, or the lowest and highest value over repetitions."""

    median: float
    low: float
    high: float

    @classmethod
    def quartiles(cls, values: Sequence[float]) -> Spread:
        """Return the median and the quartiles of many values."""
        if len(values) == 1:
            return cls.over(values)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=median, low=low, high=high)

    @classmethod
    def over(cls, values: Sequence[float]) -> Spread:
        """Return the median, the lowest and the highest value, for example over repetitions."""
        return cls(median=statistics.median(values), low=min(values), high=max(values))

    def shown(self, form: str, factor: float = 1.0) -> str:
        """Return the median, and the range if there is one."""
        median, low, high = (format(factor * value, form) for value in (self.median, self.low, self.high))
        return median if low == high else f"{median} ({low} to {high})"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown: texts to the left in the first column, numbers to the right in all others."""
    header = [f"| {' | '.join(titles)} |", "| --- |" + " ---: |" * (len(titles) - 1)]
    return "\n".join([*header, *(f"| {' | '.join(row)} |" for row in rows)])
