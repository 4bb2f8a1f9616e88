"""The task that the controller passes to a worker, as one JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class MethodSpecification:
    """One row of the table: its label, and its method and options for :mod:`gossip.lab.benchmarks.bench_methods`."""

    label: str
    kind: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class WorkerTask:
    """The location of one rank, and the methods that it runs.

    Attributes
    ----------
    rank, world_size : int
    store_address, store_port
        The address and the port of the key-value store.
    address, interface : str
        The IPv4 address and the network interface of this rank.
    local_size : int
        The number of ranks on each host.
    shared_interface : bool
        Whether all ranks use the same interface.
    methods : tuple of MethodSpecification
    num_threads : int
        The number of torch threads.
    timeout_s : float
        The time-out of any wait for other ranks.
    records : str
        The path of the JSONL file to write; its modification time shows that the rank is alive.
    """

    rank: int
    world_size: int
    store_address: str
    store_port: int
    address: str
    interface: str
    local_size: int
    shared_interface: bool
    methods: tuple[MethodSpecification, ...]
    num_threads: int
    timeout_s: float
    records: str

    @property
    def num_sharing(self) -> int:
        """The number of ranks that use the same interface."""
        return self.world_size if self.shared_interface else self.local_size

    def write(self, path: Path) -> None:
        """Write the task as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a task that :meth:`write` has written."""
        content = json.loads(path.read_text(encoding="utf-8"))
        methods = tuple(MethodSpecification(**method) for method in content.pop("methods"))
        return cls(methods=methods, **content)


@dataclass(frozen=True)
class WorkerSpecification(WorkerTask):
    """The whole task of one rank in a benchmark of steps.

    Attributes
    ----------
    model : str
        A key of :data:`gossip.lab.benchmarks.bench_models.WORKLOADS`.
    straggler : str
        One of :data:`gossip.lab.benchmarks.stragglers.KINDS`.
    repetitions, warmup_steps, steps : int
        The numbers of repetitions, warm-up steps and measured steps of every method; the warm-up comes first.
    seed : int
    probe_bucket_cap_mb : float or None
        If given, compute and links are first measured (:mod:`gossip.lab.probe`) with buckets of this size in MiB.
    """

    model: str
    straggler: str
    repetitions: int
    warmup_steps: int
    steps: int
    seed: int
    probe_bucket_cap_mb: float | None = None
