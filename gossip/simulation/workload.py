"""What the ranks of a simulated run compute, and what delays some of them."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, get_args

import numpy as np

from topologies.matrix_storage import FloatArray
from topologies.validation import check_integer, check_real


@dataclass(frozen=True)
class SlowRank:
    """A rank whose computation takes ``factor`` times as long as that of the others, in every step."""

    rank: int
    factor: float

    def __post_init__(self) -> None:
        check_integer("rank", self.rank, minimum=0)
        check_real("factor", self.factor, "above 0 and finite", example=2.0)


@dataclass(frozen=True)
class RandomDelays:
    """Delays before a step, with ``probability``, exponential with mean ``mean_s``, drawn for each rank and step."""

    mean_s: float
    probability: float = 1.0

    def __post_init__(self) -> None:
        check_real("mean_s", self.mean_s, "at least 0 and finite", example=0.1)
        check_real("probability", self.probability, "between 0 and 1", example=0.1)


Straggler = SlowRank | RandomDelays


@dataclass(frozen=True)
class Workload:
    """One step of a rank without communication, and its variation. Times are in seconds.

    Parameters
    ----------
    forward_s, backward_s : float
        Means over ranks and steps. They are divided among the buckets in proportion to their bytes.
    bucket_bytes : tuple of int
        The bytes that a rank sends for every bucket, uncompressed, in launch order: the last layers first.
    update_s : float
        The optimizer's step, for all buckets together.
    mix_s : float
        Mixing what has arrived into the parameters, for all buckets together. All-reduce has no such pass.
    contention : float
        The delay of messages, in seconds, per second of concurrent computation, caused by limited processors or memory
        bandwidth: 0 if the network needs neither, 1 if messages make no progress meanwhile.
    jitter : float
        The standard deviation of a step's computation relative to its mean: a log-normal factor, drawn for every rank
        and step.
    stragglers : tuple of SlowRank or RandomDelays
        What delays ranks.

    Raises
    ------
    ValueError, TypeError
        A number is out of range, or an argument has the wrong type.

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

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "update_s", "mix_s", "jitter"):
            check_real(name, getattr(self, name), "at least 0 and finite", example=0.1)
        check_real("contention", self.contention, "between 0 and 1", example=0.5)
        for name, kinds in (("bucket_bytes", int), ("stragglers", Straggler)):
            held = getattr(self, name)
            if not isinstance(held, tuple) or not all(isinstance(each, kinds) for each in held):
                allowed = " or ".join(kind.__name__ for kind in get_args(kinds) or (kinds,))
                raise TypeError(f"{name} must be a tuple of {allowed}, got {held!r}; write (value,) for a single one")
        if not self.bucket_bytes:
            raise ValueError("bucket_bytes is empty; give the bytes of at least one bucket")
        for number, num_bytes in enumerate(self.bucket_bytes):
            check_integer(f"bucket_bytes[{number}]", num_bytes, minimum=1)

    @property
    def model_bytes(self) -> int:
        """The bytes of all buckets together."""
        return sum(self.bucket_bytes)

    @property
    def compute_s(self) -> float:
        """The duration of a step without communication: forward, backward and update."""
        return self.forward_s + self.backward_s + self.update_s

    def check_ranks(self, world_size: int) -> None:
        """Refuse a straggler whose rank is not in the cluster."""
        for straggler in self.stragglers:
            if isinstance(straggler, SlowRank) and straggler.rank >= world_size:
                raise ValueError(
                    f"stragglers names rank {straggler.rank}, but ranks go from 0 to {world_size - 1}; name one of "
                    "them, or describe a larger cluster"
                )


class StepDraw(NamedTuple):
    """The random part of a step: the delay before it, and the factor of what computing takes; each is [n]."""

    delay_s: FloatArray
    factor: FloatArray


def draw_steps(workload: Workload, world_size: int, num_steps: int, seed: int) -> Iterator[StepDraw]:
    """Yield the steps, which are the same for every method and topology with the same seed."""
    generator = np.random.default_rng(seed)
    slow = np.ones(world_size)
    for straggler in workload.stragglers:
        if isinstance(straggler, SlowRank):
            slow[straggler.rank] *= straggler.factor
    delays = [straggler for straggler in workload.stragglers if isinstance(straggler, RandomDelays)]
    spread = np.sqrt(np.log1p(workload.jitter**2))  # the standard deviation of the logarithm; the factor has mean 1
    for _ in range(num_steps):
        delay_s = np.zeros(world_size)
        for delay in delays:
            hit = generator.random(world_size) < delay.probability
            delay_s += np.where(hit, generator.exponential(delay.mean_s, world_size), 0.0)
        factor = slow
        if spread > 0:
            factor = slow * np.exp(generator.normal(-0.5 * spread**2, spread, world_size))
        yield StepDraw(delay_s, factor)
