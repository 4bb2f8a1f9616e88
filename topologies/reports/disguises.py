"""Topologies that are another one in disguise: the same rounds under another name, or with empty rounds in between."""

from collections.abc import Iterable

import numpy as np

from topologies.matrix_storage import FloatArray
from topologies.topology import DEFAULT, Topology, family, options_of

#: Exchanges that are compared, and rounds in which they are looked for where there is no period.
_COMPARED = 64

#: Fingerprints closer than this belong to the same round.
_SAME = 1e-9


def without_disguises(topologies: Iterable[Topology]) -> list[Topology]:
    """Return the topologies without those whose exchanges are another's, in the order given.

    Exchanges are the rounds in which something is sent. Where several topologies have the same ones in the same
    order, that one stays whose rounds are empty least often; of these the one whose options are nearest to their
    defaults, the default family, and the one with the fewest options. What begins with a warm-up is like no other.

    Two rounds are the same if they map the same random vectors to the same values, which is found without comparing
    every weight; two that differ do so with probability 0. Without a period the exchanges of 64 rounds are compared.

    Examples
    --------
    >>> complete, ring = topologies.build("complete", 4), topologies.build("ring", 4)
    >>> one_node = topologies.build("local_global", 4, local_size=4)  # complete in every other round
    >>> without_disguises([one_node, ring, complete])
    [Topology('ring', world_size=4, period=1), Topology('complete', world_size=4, period=1)]
    """
    candidates = [(number, topology, *_exchanges(topology)) for number, topology in enumerate(topologies)]
    kept: dict[int, tuple[Topology, FloatArray]] = {}
    for number, topology, prints, _ in sorted(candidates, key=lambda each: (each[3], _plainness(each[1]))):
        if not any(_same(prints, others) for _, others in kept.values()):
            kept[number] = topology, prints
    return [topology for _, (topology, _) in sorted(kept.items())]


def _exchanges(topology: Topology) -> tuple[FloatArray, float]:
    """Return fingerprints of the exchanges, shape ``[exchanges, 2]``, and how many rounds there are for each."""
    readers, senders = np.random.default_rng(0).normal(size=(2, topology.world_size, 2))
    num_rounds = topology.period or _COMPARED
    rounds = [topology.round(topology.warmup + t) for t in range(num_rounds)]
    found = [(readers * round_.mix(senders)).sum(axis=0) for round_ in rounds if not round_.is_identity]
    prints = np.array(found).reshape(-1, 2)
    if topology.period is not None and found:
        prints = np.resize(prints, (max(_COMPARED, len(found)), 2))
    return prints + (np.nan if topology.warmup else 0.0), num_rounds / max(len(found), 1)


def _same(one: FloatArray, other: FloatArray) -> bool:
    shown = min(len(one), len(other))
    return (shown > 0 or len(one) == len(other)) and bool((np.abs(one[:shown] - other[:shown]) <= _SAME).all())


def _plainness(topology: Topology) -> tuple[int, bool, int, str]:
    """Return what the plainest topology has the least of: options unlike their defaults, distance from the default."""
    options = options_of(family(topology.name)) if topology.registered else {}
    unlike_default = sum(
        name in options and options[name].default not in (options[name].empty, value)
        for name, value in topology.options.items()
    )
    return unlike_default, topology.name != DEFAULT, len(options), topology.name
