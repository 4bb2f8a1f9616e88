"""What the ranks of a simulated run compute, and what makes some of them late."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

import numpy as np

from gossip.simulation.simulation_checks import check_amount
from topologies.matrix_storage import FloatArray
from topologies.validation import check_integer


@dataclass(frozen=True)
class SlowRank:
    """A rank that computes ``factor`` times as long as the others, in every step."""

    rank: int
    factor: float

    def __post_init__(self) -> None:
        check_integer("rank", self.rank, minimum=0)
        check_amount("factor", self.factor, positive=True)


@dataclass(frozen=True)
class RandomDelays:
    """Delays before a step, with ``probability``, exponential of mean ``mean_s``; drawn anew for each rank and step."""

    mean_s: float
    probability: float = 1.0

    def __post_init__(self) -> None:
        check_amount("mean_s", self.mean_s)
        if check_amount("probability", self.probability) > 1:
            raise ValueError(f"probability must be at most 1, got {self.probability!r}; correct it")


@dataclass(frozen=True)
class DropOut:
    """A rank that misses ``num_steps`` steps from ``first_step`` on.

    It neither computes nor exchanges in them, nobody waits for it, and it goes on when all others have ended the last
    of them.
    """

    rank: int
    first_step: int
    num_steps: int

    def __post_init__(self) -> None:
        check_integer("rank", self.rank, minimum=0)
        check_integer("first_step", self.first_step, minimum=0)
        check_integer("num_steps", self.num_steps, minimum=1)


Straggler = SlowRank | RandomDelays


@dataclass(frozen=True)
class Workload:
    """One step of a rank without communication, and how it varies. Times are in seconds.

    Parameters
    ----------
    forward_s, backward_s : float
        Means over ranks and steps. Buckets have the shares of it that they have of the bytes.
    bucket_bytes : tuple of int
        What a rank sends of every bucket, uncompressed, in launch order: the last layers first.
    update_s : float
        The optimizer's step, for all buckets together.
    mix_s : float
        Mixing what has arrived into the parameters, for all buckets together. All-reduce has no such pass.
    contention : float
        What a second of computing takes from the messages beside it, in seconds, for want of processors or memory
        bandwidth: 0 where the network needs neither, 1 where messages stand still meanwhile.
    jitter : float
        Standard deviation of a step's computation, as a part of its mean: a log-normal factor, drawn anew for every
        rank and step.
    stragglers : tuple of SlowRank or RandomDelays
    drop_outs : tuple of DropOut

    Raises
    ------
    ValueError, TypeError
        A number is out of range, or something is of the wrong kind.

    Examples
    --------
    >>> Workload(0.01, 0.02, (25_000_000,) * 4, stragglers=(SlowRank(0, 2.0),)).model_bytes
    100000000
    """

    forward_s: float
    backward_s: float
    bucket_bytes: tuple[int, ...]
    _: KW_ONLY
    update_s: float = 0.0
    mix_s: float = 0.0
    contention: float = 0.0
    jitter: float = 0.0
    stragglers: tuple[Straggler, ...] = ()
    drop_outs: tuple[DropOut, ...] = ()

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "update_s", "mix_s", "contention", "jitter"):
            check_amount(name, getattr(self, name))
        if self.contention > 1:
            raise ValueError(f"contention must be at most 1, got {self.contention!r}; correct it")
        for name in ("bucket_bytes", "stragglers", "drop_outs"):
            if not isinstance(getattr(self, name), tuple):
                raise TypeError(f"{name} must be a tuple, got {getattr(self, name)!r}; write (value,) for a single one")
        if not self.bucket_bytes:
            raise ValueError("bucket_bytes is empty; give the bytes of at least one bucket")
        for number, num_bytes in enumerate(self.bucket_bytes):
            check_integer(f"bucket_bytes[{number}]", num_bytes, minimum=1)
        for name, kinds in (("stragglers", (SlowRank, RandomDelays)), ("drop_outs", (DropOut,))):
            for delay in getattr(self, name):
                if not isinstance(delay, kinds):
                    allowed = " or ".join(kind.__name__ for kind in kinds)
                    raise TypeError(
                        f"{name} must hold {allowed}, got {delay!r} ({type(delay).__name__}); pass such ones"
                    )

    @property
    def model_bytes(self) -> int:
        """Of all buckets together."""
        return sum(self.bucket_bytes)

    @property
    def compute_s(self) -> float:
        """A step without communication: forward, backward and update."""
        return self.forward_s + self.backward_s + self.update_s

    def check_ranks(self, world_size: int) -> None:
        """Refuse stragglers and drop-outs that are not among the ranks."""
        for name, held in (("stragglers", self.stragglers), ("drop_outs", self.drop_outs)):
            for delay in held:
                if not isinstance(delay, RandomDelays) and delay.rank >= world_size:
                    raise ValueError(
                        f"{name} names rank {delay.rank}, ranks go from 0 to {world_size - 1}; name one of them, or "
                        f"describe a larger cluster"
                    )


@dataclass(frozen=True)
class StepDraw:
    """What chance and ``Workload`` have decided for one step, shape ``[n]`` each.

    Attributes
    ----------
    delay_s
        Before the step.
    factor
        By which computing takes longer than the mean.
    present
        Who takes part; None: all do.
    """

    delay_s: FloatArray
    factor: FloatArray
    present: np.ndarray[tuple[int], np.dtype[np.bool_]] | None


def draw_steps(workload: Workload, world_size: int, num_steps: int, seed: int) -> Iterator[StepDraw]:
    """Yield the steps; the same for every method and topology under a seed."""
    generator = np.random.default_rng(seed)
    slow = np.ones(world_size)
    for straggler in workload.stragglers:
        if isinstance(straggler, SlowRank):
            slow[straggler.rank] *= straggler.factor
    delays = [straggler for straggler in workload.stragglers if isinstance(straggler, RandomDelays)]
    spread = np.sqrt(np.log1p(workload.jitter**2))  # of the logarithm, so that the factor has mean 1
    for step in range(num_steps):
        delay_s = np.zeros(world_size)
        for delay in delays:
            hit = generator.random(world_size) < delay.probability
            delay_s += np.where(hit, generator.exponential(delay.mean_s, world_size), 0.0)
        factor = slow
        if spread > 0:
            factor = slow * np.exp(generator.normal(-0.5 * spread**2, spread, world_size))
        absent = [d.rank for d in workload.drop_outs if d.first_step <= step < d.first_step + d.num_steps]
        present = None
        if absent:
            present = np.ones(world_size, dtype=np.bool_)
            present[absent] = False
        yield StepDraw(delay_s, factor, present)
