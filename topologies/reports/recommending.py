"""Which topology brings the ranks of a cluster to agreement first, under an alpha-beta model of its network."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from topologies import analysis
from topologies.reports.comparing import chosen_topologies
from topologies.reports.family_samples import title_of, without_disguises
from topologies.reports.units import aligned, seconds_text
from topologies.topology import DEFAULT, Topology, build
from topologies.validation import check_local_size, check_real, check_world_size


@dataclass(frozen=True)
class Network:
    """The alpha-beta model: b bytes in s steps take ``s * latency_us`` and ``b / bandwidth_gbps``.

    Every node has one link of the same speed in both directions, shared by its ranks; what stays inside a node costs
    nothing.
    """

    latency_us: float
    bandwidth_gbps: float
    message_mb: float
    local_size: int

    def seconds(self, steps: int, messages: float) -> float:
        """Return how long an exchange takes of so many steps, and messages of its busiest node."""
        return steps * self.latency_us * 1e-6 + self.wire_seconds(messages)

    def wire_seconds(self, messages: float) -> float:
        """Return how long so many messages of one node are on its link."""
        return messages * self.message_mb * 8e6 / (self.bandwidth_gbps * 1e9)


@dataclass(frozen=True)
class Recommended:
    """A topology, its rounds until the worst disagreement is down to the tolerance, and the time that they take.

    The longest round is what training has to hide beside one step. The arithmetic is how many exchanges there are of
    each cost.
    """

    topology: Topology
    rounds: int
    seconds: float
    longest_round_seconds: float
    arithmetic: str


@dataclass(frozen=True)
class Recommendation:
    """Topologies by predicted time, the fastest first; ``str()`` shows the arithmetic.

    ``default`` is the topology with which ranks gossip unless another one is chosen, whether it is ranked or not; None
    if it never gets to the tolerance. ``num_disguised`` were left out because their exchanges are those of another one.
    """

    ranked: tuple[Recommended, ...]
    world_size: int
    network: Network
    tolerance: float
    num_disguised: int = 0
    default: Recommended | None = None

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return one dictionary of plain JSON types per topology, the fastest first."""
        return [vars(row) | {"topology": title_of(row.topology)} for row in self.ranked]

    def to_text(self, num_rows: int | None = None) -> str:
        """Return the table of the first ``num_rows`` topologies, by default of all, and what it says and does not say.

        Examples
        --------
        >>> found = recommend(4, latency_us=20, bandwidth_gbps=25, message_mb=100)
        >>> found.to_text(2).splitlines()[-3].split("; ")[:2]
        ['complete agrees first, after 48.12 ms', '18 more take longer, see them with --all']
        """
        network = self.network
        per_node = "1 rank" if network.local_size == 1 else f"{network.local_size} ranks"
        return "\n".join(
            [
                *self._beginning(),
                f"{self.world_size} ranks, {per_node} per node; a message of {network.message_mb:g} MB takes "
                f"{seconds_text(network.wire_seconds(1.0))} on a node's link of {network.bandwidth_gbps:g} Gbit/s.",
                f"Time to {self._left} of the worst disagreement, if rounds follow without a pause =",
                "exchanges x (steps x latency + messages of the busiest node x MB / bandwidth). Inside a node it is "
                "free.",
                "",
                *self._table(self.ranked[:num_rows]),
                "",
                self._closing(len(self.ranked[:num_rows])),
                f"Ranked by the time until the ranks agree on a mean, to {self._left}: the criterion where a mean is "
                "wanted. Training hides rounds beside",
                "its steps and needs no full agreement; for that ask `gossip probe`, which measures steps of training.",
            ]
        )

    __str__ = to_text

    @property
    def _left(self) -> str:
        return f"{100 * self.tolerance:.3g} %"

    def _beginning(self) -> list[str]:
        if self.default is None or not self.ranked:
            return []
        best, own = self.ranked[0], self.default
        others = "; nothing below agrees sooner"
        if own.seconds > best.seconds:
            others = f"; {title_of(best.topology)} {_times(best)}"
        return [f"{DEFAULT}, the default, {_times(own)}{others}.", ""]

    def _table(self, shown: Sequence[Recommended]) -> list[str]:
        head = ("", "topology", "longest round", f"time to {self._left}", "= exchanges")
        rows = (
            (
                f"{place}.",
                title_of(row.topology),
                seconds_text(row.longest_round_seconds),
                seconds_text(row.seconds),
                f"= {row.arithmetic}",
            )
            for place, row in enumerate(shown, start=1)
        )
        return [line.rstrip() for line in aligned([head, *rows], "><>><")]

    def _closing(self, num_shown: int) -> str:
        if not self.ranked:
            return f"No topology gets down to {self._left} of the worst disagreement; allow more with tolerance."
        first = self.ranked[0]
        parts = [f"{title_of(first.topology)} agrees first, after {seconds_text(first.seconds)}"]
        if num_more := len(self.ranked) - num_shown:
            parts.append(f"{num_more} more take longer, see them with --all")
        if self.num_disguised:
            parts.append(f"{self.num_disguised} others, whose exchanges are those of one of them, are left out")
        return "; ".join(parts) + "."


def recommend(
    world_size: int,
    *,
    topologies: Iterable[str | Topology] | None = None,
    latency_us: float,
    bandwidth_gbps: float,
    message_mb: float,
    local_size: int = 1,
    tolerance: float = 0.01,
) -> Recommendation:
    """Rank topologies by the predicted time to a tolerance.

    The time of an exchange is ``steps * latency + bytes of the busiest node / bandwidth``, see
    :class:`topologies.analysis.RoundTraffic`; rounds follow each other without a pause. It is the time of averaging
    alone: training hides the part of it that fits beside its computation.

    Parameters
    ----------
    world_size
        Number of ranks n.
    topologies
        Names and topologies as for :func:`topologies.compare`; by default every family that serves n, without those
        whose exchanges are another's, such as ``local_global`` on a single node, which is ``complete`` in every other
        round. What never gets to the tolerance is left out.
    latency_us
        Microseconds per step between two nodes (alpha), 0 or more.
    bandwidth_gbps
        Gigabits per second of every node's link, in each direction (the inverse of beta).
    message_mb
        Megabytes (10^6 bytes) of one message, usually those of the model.
    local_size
        Ranks per node; what they send to each other is free. It divides the world size.
    tolerance
        What is left of the worst disagreement.

    Examples
    --------
    >>> found = recommend(16, latency_us=20, bandwidth_gbps=25, message_mb=100)
    >>> found.ranked[0].topology.exact_after, round(found.ranked[0].seconds, 4)
    (1, 0.0606)
    """
    world_size = check_world_size(world_size)
    network = Network(
        latency_us=check_real("latency_us", latency_us, "at least 0 and finite", example=20),
        bandwidth_gbps=check_real("bandwidth_gbps", bandwidth_gbps, "above 0 and finite", example=25),
        message_mb=check_real("message_mb", message_mb, "above 0 and finite", example=100),
        local_size=check_local_size(local_size, world_size),
    )
    chosen = list(chosen_topologies(topologies, world_size, network.local_size))
    candidates = without_disguises(chosen) if topologies is None else chosen
    ranked = [row for each in candidates if (row := _recommended(each, tolerance, network)) is not None]
    ranked.sort(key=lambda row: (row.seconds, row.topology.name != DEFAULT, row.rounds, title_of(row.topology)))
    default = _recommended(build(DEFAULT, world_size), tolerance, network)
    num_disguised = len(chosen) - len(candidates)
    return Recommendation(tuple(ranked), world_size, network, tolerance, num_disguised, default)


def _times(row: Recommended) -> str:
    total, longest = seconds_text(row.seconds), seconds_text(row.longest_round_seconds)
    return f"agrees after {total}, its longest round takes {longest}"


def _recommended(topology: Topology, tolerance: float, network: Network) -> Recommended | None:
    if (rounds := analysis.rounds_to(topology, tolerance)) is None:
        return None
    traffic = analysis.traffic(topology, local_size=network.local_size).rounds
    whole, rest = divmod(rounds, len(traffic))
    costs: Counter[tuple[int, float]] = Counter()
    for number, round_ in enumerate(traffic):
        costs[round_.steps, round_.busiest_node] += whole + (number < rest)
    seconds = {cost: network.seconds(*cost) for cost in costs}
    total = sum(count * seconds[cost] for cost, count in costs.items())
    return Recommended(topology, rounds, total, max(seconds.values()), " + ".join(_terms(costs, network)))


def _terms(costs: Counter[tuple[int, float]], network: Network) -> Iterator[str]:
    """Yield one term for all exchanges of the same cost."""
    for (steps, messages), count in costs.items():
        if count and not steps:
            yield f"{count} inside nodes"
        elif count:
            yield (
                f"{count} x ({steps} x {network.latency_us:g} us + {messages:.4g} x {network.message_mb:g} MB / "
                f"{network.bandwidth_gbps:g} Gbit/s)"
            )
