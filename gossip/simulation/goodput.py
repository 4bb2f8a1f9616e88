"""Goodput of a long run whose nodes fail: the share of its rank-seconds that end up in the model."""

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from gossip.simulation.cluster import Cluster
from topologies.validation import check_integer, check_real

METHODS = ("restart", "quorum", "gossip")


@dataclass(frozen=True)
class Failures:
    """How often ranks fail, and what a failure costs.

    A rank fails at random, at a constant rate, and takes its node with it: its ranks start again together. All
    durations are in seconds.

    Parameters
    ----------
    hours_per_failure : float
        The mean time between two failures of a single rank, in hours: ranks times hours over interruptions.
    step_s : float
        A step.
    detect_s : float
        From a failure until the other ranks know of it.
    restart_s : float
        From then until what has been started again is ready to train.
    rejoin_s : float
        How long it then takes to get the state of the others: it trains only after that.
    waits_s : float
        How long the others wait while it does so.
    save_s : float
        How long a checkpoint stops all ranks.
    save_every_s : float, optional
        The time between two checkpoints; by default the one that costs least, the square root of two times ``save_s``
        times the mean time between failures of any rank.
    min_share : float
        With fewer ranks than this share, nobody trains.

    References
    ----------
    Young, "A first order approximation to the optimum checkpoint interval", CACM 1974; Daly, FGCS 2006.
    """

    hours_per_failure: float
    _: KW_ONLY
    step_s: float = 1.0
    detect_s: float = 1.0
    restart_s: float = 60.0
    rejoin_s: float = 10.0
    waits_s: float = 0.0
    save_s: float = 10.0
    save_every_s: float | None = None
    min_share: float = 0.5

    def __post_init__(self) -> None:
        for name in ("hours_per_failure", "step_s"):
            check_real(name, getattr(self, name), "above 0 and finite", example=1.0)
        for name in ("detect_s", "restart_s", "rejoin_s", "waits_s", "save_s"):
            check_real(name, getattr(self, name), "at least 0 and finite", example=1.0)
        check_real("min_share", self.min_share, "between 0 and 1", example=0.5)
        if self.save_every_s is not None:
            check_real("save_every_s", self.save_every_s, "above 0 and finite", example=600.0)


@dataclass(frozen=True)
class SimulatedGoodput:
    """What became of the rank-seconds of a run, as shares that sum to 1.

    Attributes
    ----------
    goodput : float
        In the model.
    saving : float
        In which all ranks wrote a checkpoint.
    redone : float
        Whose updates were lost, and were made again.
    down : float
        Of ranks that had failed, until they trained again.
    waiting : float
        In which others waited, because a rank had failed or came back.
    """

    goodput: float
    saving: float
    redone: float
    down: float
    waiting: float


def simulate_goodput(
    cluster: Cluster,
    failures: Failures,
    method: Literal["restart", "quorum", "gossip"],
    *,
    hours: float = 1000.0,
    seed: int = 0,
) -> SimulatedGoodput:
    """Return the goodput of a long run with one of three ways to go on after a failure. Needs no process group; local.

    Parameters
    ----------
    cluster : Cluster
        How many nodes there are, and of how many ranks.
    failures : Failures
        How often they fail, and what that costs.
    method : str
        "restart": all ranks stop, start again and go on from the newest checkpoint. "quorum": the others lose the step
        in which a node fails, agree on who is left, and go on without it; it takes their state while they wait
        ``waits_s`` (fault-tolerant data parallelism). "gossip": the others miss the node for ``detect_s``, go on, and
        give it their state while they train; its own newest two steps are lost (``on_peer_loss="continue"``).
    hours : float
        The length of the run.
    seed : int
        The seed of the failures, which are the same for every method.

    Raises
    ------
    ValueError, TypeError
        An argument is out of range.

    Examples
    --------
    >>> cluster, failures = Cluster(1024, 8), Failures(50_000)
    >>> [round(simulate_goodput(cluster, failures, method).goodput, 2) for method in ("restart", "gossip")]
    [0.97, 1.0]
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}")
    seconds = 3600 * check_real("hours", hours, "above 0 and finite", example=1000.0)
    rate = cluster.world_size / (3600 * failures.hours_per_failure)
    times = _times(rate, seconds, random.Random(check_integer("seed", seed, minimum=0)))
    if method == "restart":
        return _restarted(failures, rate, seconds, times)
    return _continued(failures, cluster.num_nodes, seconds, times, is_quorum=method == "quorum", seed=seed)


def _times(rate: float, seconds: float, drawn: random.Random) -> Iterator[float]:
    at = 0.0
    while (at := at + drawn.expovariate(rate)) < seconds:
        yield at
    yield math.inf


def _restarted(failures: Failures, rate: float, seconds: float, times: Iterator[float]) -> SimulatedGoodput:
    """All stop at each failure; what they have done since the newest checkpoint is done again."""
    every_s = failures.save_every_s or max(failures.step_s, math.sqrt(2 * failures.save_s / rate))
    stopped_s = failures.detect_s + failures.restart_s + failures.rejoin_s
    saving = redone = down = now = 0.0
    for failed_at in times:
        trained_s = max(0.0, min(failed_at, seconds) - now)
        num_saved = trained_s // (every_s + failures.save_s)
        saving += num_saved * failures.save_s
        if failed_at >= seconds:
            break
        redone += trained_s - num_saved * (every_s + failures.save_s)
        ready = min(seconds, failed_at + stopped_s)  # a failure before it is ready begins that anew
        down += max(0.0, ready - max(now, failed_at))
        now = max(now, ready)
    return _shares(seconds, saving=saving, redone=redone, down=down)


def _continued(
    failures: Failures, num_nodes: int, seconds: float, times: Iterator[float], *, is_quorum: bool, seed: int
) -> SimulatedGoodput:
    """Only the node that fails is down; times are summed over nodes."""
    drawn = random.Random(seed + 1)
    away_s = failures.detect_s + failures.restart_s + failures.rejoin_s
    back: list[tuple[float, int]] = []  # when a node trains again
    down_until: dict[int, float] = {}
    redone = down = waiting = now = waits_until = 0.0
    failed_at = next(times)
    while now < seconds:
        until = min(failed_at, back[0][0] if back else math.inf, seconds)
        num_up, span = num_nodes - len(down_until), until - now
        down += (num_nodes - num_up) * span
        is_stopped = num_up < failures.min_share * num_nodes
        waiting += num_up * (span if is_stopped else min(span, max(0.0, waits_until - now)))
        now = until
        if now >= seconds:
            break
        if failed_at <= now:
            node = drawn.randrange(num_nodes)
            redone += failures.step_s * (num_up / 2 if is_quorum else 2) * (node not in down_until)
            down_until[node] = now + away_s
            heapq.heappush(back, (now + away_s, node))
            waits_until = max(waits_until, now + failures.detect_s)
            failed_at = next(times)
        else:
            at, node = heapq.heappop(back)
            if down_until.get(node) == at:  # it has not failed again
                del down_until[node]
                waits_until = max(waits_until, now + (failures.waits_s if is_quorum else 0.0))
    return _shares(num_nodes * seconds, redone=redone, down=down, waiting=waiting)


def _shares(total: float, *, redone: float, down: float, saving: float = 0.0, waiting: float = 0.0) -> SimulatedGoodput:
    redone = min(redone, total - saving - down - waiting)
    lost = saving + redone + down + waiting
    return SimulatedGoodput(1 - lost / total, saving / total, redone / total, down / total, waiting / total)
