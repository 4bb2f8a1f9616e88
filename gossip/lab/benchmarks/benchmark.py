"""What a benchmark is: its settings, what a worker does, what becomes of the records, and how that is reported."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PositiveFloat,
    ValidationInfo,
    field_validator,
    model_validator,
)

from gossip.lab.benchmarks.bench_methods import MethodSpecification, expand
from gossip.lab.benchmarks.network.networks import Link
from gossip.lab.benchmarks.network.shaped_hosts import MAX_HOSTS
from gossip.lab.experiments.validated_models import Model

Record = dict[str, Any]
"""What a rank has written about one measurement, as plain JSON types."""
S = TypeVar("S", bound="BenchmarkSettings")
R = TypeVar("R", bound=BaseModel)


def _check_link(text: str) -> str:
    Link.parse(text)
    return text


def _texts(value: Any) -> list[str]:
    return [str(each) for each in (value if isinstance(value, list) else [value])]


Links = Annotated[
    tuple[Annotated[str, AfterValidator(_check_link)], ...], Field(min_length=1, strict=False), BeforeValidator(_texts)
]
"""Links of the lab as texts for :meth:`gossip.lab.benchmarks.network.networks.Link.parse`; one or a list of them."""


class BenchmarkSettings(Model):
    """The settings that every benchmark has; a case, which one start of the workers measures, has a single link.

    Attributes
    ----------
    world_size : int
        The number of workers.
    local_size : int
        The number of workers on each host of the lab.
    network : str
        Either "loopback" or "lab".
    links : tuple of str
        The links of every host of the lab, which are measured one after another.
    num_threads : int
        The number of torch threads per worker.
    timeout_s : float
        The time-out of any wait for other ranks.
    """

    world_size: int = Field(ge=2)
    local_size: int = Field(1, ge=1)
    network: Literal["loopback", "lab"]
    links: Links
    num_threads: int = Field(1, ge=1, alias="threads")
    timeout_s: PositiveFloat = 120.0

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        if self.world_size % self.local_size:
            raise ValueError(
                f"local_size={self.local_size} does not divide world_size={self.world_size}; every host has as many"
            )
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

    def cases(self) -> Iterator[tuple[str, Self]]:
        """Yield the settings of each case, and a name for the folder of its records."""
        for link in self.links if self.network == "lab" else self.links[:1]:
            case = self.model_copy(update={"links": (link,)})
            yield case.link or self.network, case


class ComparisonSettings(BenchmarkSettings):
    """The settings of a benchmark that compares methods.

    Attributes
    ----------
    methods : tuple of MethodSpecification
        The methods, in the configuration as a mapping for :func:`gossip.lab.benchmarks.bench_methods.expand`.
    """

    methods: tuple[MethodSpecification, ...]

    @field_validator("methods", mode="before")
    @classmethod
    def _expand(cls, given: Any, info: ValidationInfo) -> Any:
        if isinstance(given, list) and given:  # as they are written for the workers
            return tuple(MethodSpecification.model_validate(each) for each in given)
        return expand(given, info.data.get("world_size", 1), info.data.get("local_size", 1))


class Place(Model):
    """The place of one rank of a case, as its worker is told.

    Attributes
    ----------
    rank : int
    store_address, store_port
        The address and the port of the key-value store.
    address, interface : str
        The IPv4 address and the network interface of this rank.
    num_sharing : int
        The number of ranks that use the same interface.
    records : str
        The path of the JSONL file to write; its modification time shows that the rank is alive.
    """

    rank: int
    store_address: str
    store_port: int
    address: str
    interface: str
    num_sharing: int
    records: str

    def show_life(self) -> None:
        """Tell the controller that this rank makes progress."""
        os.utime(self.records)


class Benchmark(Generic[S, R]):
    """A benchmark. A subclass is one file, and one row of :data:`gossip.lab.benchmarks.benchmark_names.BENCHMARKS`.

    Attributes
    ----------
    settings : type
        The model of the configuration.
    title, explanation : str
        The heading of the report, and its last paragraph.
    files : (str, str)
        The names of the files with the results and the report.
    """

    settings: type[S]
    title: ClassVar[str]
    explanation: ClassVar[str]
    files: ClassVar[tuple[str, str]] = ("results.json", "report.md")

    def available(self, settings: S) -> tuple[S, list[str]]:
        """Return what can be measured here, and a note about each thing that is left out."""
        return settings, []

    def work(self, case: S, place: Place) -> Iterator[Record]:
        """Measure on one rank, and yield the records. Collective."""
        raise NotImplementedError

    def progress(self, case: S, number: int, record: Record) -> str | None:  # noqa: ARG002
        """Return a line about the record of rank 0 with this number, counted from 0; None says nothing."""
        return None

    def result(self, case: S, records: Sequence[Sequence[Mapping[str, Any]]]) -> R:
        """Return the result of a case from the records of each rank."""
        raise NotImplementedError

    def facts(self, settings: S) -> list[str]:  # noqa: ARG002
        """Return sentences about what was measured, for the head of the report."""
        return []

    def sections(self, results: Sequence[R]) -> list[str]:
        """Return the paragraphs and tables of the report."""
        raise NotImplementedError

    def draw(self, results: Sequence[R], folder: Path) -> None:
        """Write the figures."""
