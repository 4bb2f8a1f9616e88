"""What the controller tells a worker, as one JSON file."""

from __future__ import annotations

from dataclasses import dataclass

from gossip.lab.benchmarks.bench_specification import WorkerTask


@dataclass(frozen=True)
class LossSpecification(WorkerTask):
    """One rank's whole task; the first of the methods is all-reduce, whose final loss the others are to reach.

    Attributes
    ----------
    task : str
        Of :data:`gossip.lab.time_to_loss.loss_tasks.TASKS`.
    seeds : tuple of int
        Of the initial values and the batches; all methods take turns with each.
    steps : int
        That all-reduce makes.
    evaluate_every : int
        Steps between evaluations.
    max_time_ratio : float
        How many times all-reduce's time the others have.
    as_probed : bool
        Whether gossip with what the probe chooses is one more method.
    quiet_s : float
        For how long nothing may have been on the wire before the clock counts as stopped; 0: do not wait for it.
    """

    task: str
    seeds: tuple[int, ...]
    steps: int
    evaluate_every: int
    max_time_ratio: float
    as_probed: bool
    quiet_s: float
