"""What the controller tells a worker, as one JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class MethodSpecification:
    """One row of the table: its label, and what :mod:`gossip.lab.benchmarks.bench_methods` is given for it."""

    label: str
    kind: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class WorkerTask:
    """Where one rank is, and which methods it runs.

    Attributes
    ----------
    rank, world_size : int
    store_address, store_port
        Of the key-value store.
    address, interface : str
        This rank's own.
    local_size : int
        How many ranks are on each host.
    shared_interface : bool
        Whether all ranks use the same interface.
    methods : tuple of MethodSpecification
    num_threads : int
        torch's.
    timeout_s : float
        Of any wait for other ranks.
    records : str
        The JSONL file to write; its time of change says that the rank is alive.
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
        """How many ranks use the same interface."""
        return self.world_size if self.shared_interface else self.local_size

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        """What :meth:`write` has written."""
        content = json.loads(path.read_text(encoding="utf-8"))
        methods = tuple(MethodSpecification(**method) for method in content.pop("methods"))
        return cls(methods=methods, **content)


@dataclass(frozen=True)
class WorkerSpecification(WorkerTask):
    """One rank's whole task in a benchmark of steps.

    Attributes
    ----------
    model : str
        Of :data:`gossip.lab.benchmarks.bench_models.WORKLOADS`.
    straggler : str
        Of :data:`gossip.lab.benchmarks.stragglers.KINDS`.
    repetitions, warmup_steps, steps : int
        Of every method; steps are measured, those of the warm-up come before.
    seed : int
    probe_bucket_cap_mb : float or None
        Measure compute and links first (:mod:`gossip.lab.probe`), with such buckets; None: do not.
    """

    model: str
    straggler: str
    repetitions: int
    warmup_steps: int
    steps: int
    seed: int
    probe_bucket_cap_mb: float | None = None
