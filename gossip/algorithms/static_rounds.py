"""Which topologies exchange along the same edges, with the same weights, in every exchange."""

from __future__ import annotations

from topologies import Round, Topology


def check_static(topology: Topology, needed_by: str, instead: str, *, symmetric: bool = False) -> None:
    """Refuse a topology whose exchanges differ from each other; local steps between them do not matter.

    Parameters
    ----------
    topology : Topology
    needed_by : str
        What cannot do without: "compression choco", "algorithm ExactDiffusion".
    instead : str
        What to choose on such a topology.
    symmetric : bool
        Whether W must be symmetric too.

    Raises
    ------
    ValueError
        Says why, and what to choose.
    """
    if topology.world_size == 1:
        return
    round_: Round | None = None
    for phase in topology.phases:
        if phase.topology.period is None:
            _refuse(topology, "never repeats its rounds", needed_by, instead)
        for exchange in range(phase.num_distinct(sampled=0)):
            other = phase.topology.round(exchange)
            if other.is_identity:
                continue
            if round_ is not None and other != round_:
                _refuse(topology, "mixes by another matrix from one exchange to the next", needed_by, instead)
            round_ = other
    if symmetric and round_ is not None and not round_.is_symmetric:
        raise ValueError(
            f"topology {topology.name!r} has edges of one direction, or of two weights: {needed_by} needs two "
            f"ranks that read each other with one weight; choose {instead}, or an undirected topology such as ring"
        )


def _refuse(topology: Topology, what: str, needed_by: str, instead: str) -> None:
    raise ValueError(
        f"topology {topology.name!r} {what}: {needed_by} builds on what the same peers sent in all "
        f"exchanges before; choose {instead}, or a static topology such as ring"
    )
