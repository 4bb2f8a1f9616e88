"""The task that the controller passes to a worker, as one JSON file."""

from __future__ import annotations

from dataclasses import dataclass

from gossip.lab.benchmarks.bench_specification import WorkerTask


@dataclass(frozen=True)
class LossSpecification(WorkerTask):
    """The whole task of one rank; the first method is all-reduce, whose final loss the other methods are to reach.

    Attributes
    ----------
    task : str
        A key of :data:`gossip.lab.time_to_loss.loss_tasks.TASKS`.
    seeds : tuple of int
        The seeds of the initial values and the batches; all methods train from each seed in turn.
    steps : int
        The number of steps that all-reduce makes.
    evaluate_every : int
        The number of steps between evaluations.
    max_time_ratio : float
        The time limit of the other methods, as a multiple of all-reduce's time.
    as_probed : bool
        Whether gossip as chosen by the probe is an additional method.
    quiet_s : float
        The time without traffic on the wire after which the clock may stop; 0 means not to wait for silence.
    """

    task: str
    seeds: tuple[int, ...]
    steps: int
    evaluate_every: int
    max_time_ratio: float
    as_probed: bool
    quiet_s: float
