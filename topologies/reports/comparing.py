"""Topologies side by side: how fast they agree, in rounds and in bytes, as data and as a table."""

import csv
import io
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from topologies import analysis
from topologies.reports.family_samples import title_of, without_disguises
from topologies.reports.units import aligned, bytes_text
from topologies.topology import Topology, available, build, choices_of, variants
from topologies.validation import check_measured_size, check_world_size


@dataclass(frozen=True)
class Compared:
    """One topology of a comparison, by its name with options. ``None``: it never gets there, or has no period.

    Attributes
    ----------
    max_sends
        Most messages of one rank in one round, point to point.
    bytes_per_round, network_bytes_per_round
        Bytes per round, on average, that a rank sends and that all nodes together put on the network; see
        :func:`topologies.analysis.traffic`.
    rate, rate_per_byte
        The factor by which a disagreement shrinks in the long run: per round, and per byte that a rank sends,
        ``rate ** (1 / bytes_per_round)``.
    rounds, bytes, network_bytes
        Rounds until the worst disagreement is down to the tolerance, and the bytes in them: those that a rank sends,
        and those that all nodes together put on the network.
    """

    topology: str
    period: int | None
    max_sends: int
    bytes_per_round: float
    network_bytes_per_round: float
    rate: float
    rate_per_byte: float
    rounds: int | None
    bytes: float | None
    network_bytes: float | None
    exact_after: int | None


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`: ``str()`` is a table, :meth:`to_csv` and :meth:`to_dicts` are plain data.

    :func:`topologies.draw_comparison` makes a figure of it.

    Those stand first that send the fewest bytes until they agree. ``asked`` is whether they were named or passed, and
    not all families looked at.
    """

    topologies: tuple[Topology, ...]
    rows: tuple[Compared, ...]
    world_size: int
    message_bytes: float
    local_size: int
    tolerance: float
    asked: bool = True

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return one dictionary of plain JSON types per topology."""
        return [asdict(row) for row in self.rows]

    def to_csv(self) -> str:
        """Return one line per topology under a line of names; what is ``None`` is empty."""
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(Compared.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in self.rows)
        return text.getvalue()

    def __str__(self) -> str:
        left = f"{100 * self.tolerance:.3g} %"
        header = (
            "topology", "period", "sends", "bytes/round", "network/round", "rate", "rate/message", f"rounds to {left}",
            f"bytes to {left}", f"network to {left}", "exact after",
        )  # fmt: skip
        cells = [header, *(self._cells(row) for row in self.rows)]
        table = "\n".join(aligned(cells, "<" + ">" * (len(header) - 1)))
        return (
            f"{self.heading}; bytes are those that a rank sends, on average, network those between all nodes; "
            f"rates are per round and per message sent\n\n{table}"
        )

    @property
    def heading(self) -> str:
        """The ranks, nodes and messages that are compared."""
        nodes = f" on nodes of {self.local_size}" if self.local_size > 1 else ""
        counted = self.message_bytes == 1.0
        messages = "bytes counted in messages" if counted else f"messages of {bytes_text(self.message_bytes)}"
        return f"{self.world_size} ranks{nodes}, {messages}"

    def _cells(self, row: Compared) -> tuple[str, ...]:
        return (
            row.topology,
            "-" if row.period is None else str(row.period),
            str(row.max_sends),
            bytes_text(row.bytes_per_round),
            bytes_text(row.network_bytes_per_round),
            f"{row.rate:.4f}",
            f"{row.rate_per_byte**self.message_bytes:.4f}",
            "never" if row.rounds is None else str(row.rounds),
            "-" if row.bytes is None else bytes_text(row.bytes),
            "-" if row.network_bytes is None else bytes_text(row.network_bytes),
            "never" if row.exact_after is None else str(row.exact_after),
        )


def compare(
    topologies: Iterable[str | Topology] | None = None,
    *,
    world_size: int | None = None,
    message_bytes: float = 1.0,
    local_size: int = 1,
    tolerance: float = 0.01,
) -> Comparison:
    """Return how fast topologies agree, those first that send the fewest bytes until they do.

    Parameters
    ----------
    topologies
        Names of families, each with the options worth trying (see :func:`topologies.variants`), and topologies, all
        for as many ranks; by default every family that serves ``world_size``.
    world_size
        Number of ranks; needed for names.
    message_bytes
        Bytes of one message, usually those of the model; by default bytes are counted in models.
    local_size
        Ranks per node, to tell what crosses the network; it divides the world size.
    tolerance
        What is left of the worst disagreement when the ranks are said to agree.

    Examples
    --------
    >>> found = compare(["ring", "one_peer_exponential"], world_size=16)
    >>> [(row.topology, row.rounds, row.bytes) for row in found.rows]
    [('one_peer_exponential', 4, 4.0), ('ring', 89, 178.0)]
    """
    chosen = list(chosen_topologies(topologies, world_size, local_size))
    if not chosen:
        raise ValueError("topologies is empty; pass names of topologies.available(), or topologies")
    compared = [(_compared(topology, message_bytes, local_size, tolerance), topology) for topology in chosen]
    # What never agrees comes last.
    compared.sort(key=lambda pair: [math.inf if cost is None else cost for cost in (pair[0].bytes, pair[0].rounds)])
    rows, ordered = zip(*compared, strict=True)
    return Comparison(
        topologies=ordered,
        rows=rows,
        world_size=chosen[0].world_size,
        message_bytes=message_bytes,
        local_size=local_size,
        tolerance=tolerance,
        asked=topologies is not None,
    )


def chosen_topologies(
    items: Iterable[str | Topology] | None, world_size: int | None, local_size: int
) -> Iterator[Topology]:
    """Yield the topologies that a user named or passed, by default the variants of all families; see compare.

    All are for one number of ranks.
    """
    if isinstance(items, str | Topology):
        raise TypeError(f"topologies must be a list of names and topologies, got {items!r}; put it into a list")
    names_needed = items is None
    if world_size is not None:
        check_measured_size(check_world_size(world_size))
    size = world_size
    for item in available() if items is None else items:
        if isinstance(item, Topology):
            if size not in (None, item.world_size):
                raise ValueError(
                    f"topologies holds {item.name!r} for {item.world_size} ranks, world_size is {size}; build it for "
                    f"{size}"
                )
            size = item.world_size
            check_measured_size(size)
            yield item
            continue
        if not isinstance(item, str):
            raise TypeError(f"topologies holds {item!r} ({type(item).__name__}); pass names and topologies")
        if world_size is None:
            raise TypeError(f"world_size is needed to build {item!r}; pass world_size=8, or built topologies")
        with warnings.catch_warnings():
            if names_needed:
                warnings.simplefilter("ignore")  # nobody has asked for this family
            found = without_disguises(variants(item, world_size, local_size=local_size))
        if not found and not names_needed:
            options = next(iter(choices_of(item, world_size, local_size)), {})
            found = [build(item, world_size, **options)]  # refuses with the family's own reason
        yield from found


def _compared(topology: Topology, message_bytes: float, local_size: int, tolerance: float) -> Compared:
    traffic = analysis.traffic(topology, message_bytes=message_bytes, local_size=local_size)
    rounds = analysis.rounds_to(topology, tolerance)
    return Compared(
        topology=title_of(topology),
        period=topology.period,
        max_sends=analysis.degrees(topology).max_sends,
        bytes_per_round=traffic.bytes_per_rank,
        network_bytes_per_round=traffic.network_bytes,
        rate=analysis.consensus_rate(topology),
        rate_per_byte=analysis.rate_per_byte(topology, message_bytes=message_bytes),
        rounds=rounds,
        bytes=None if rounds is None else traffic.bytes_in(rounds),
        network_bytes=None if rounds is None else traffic.network_bytes_in(rounds),
        exact_after=topology.exact_after,
    )
