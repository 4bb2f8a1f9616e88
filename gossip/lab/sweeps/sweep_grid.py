"""Which runs a sweep is made of: every combination of its axes, and the baselines once for each setting."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

BASELINES = ("ddp", "local")
"""The methods that every setting is compared with: all-reduce, and no exchange at all."""

GOSSIP_ONLY = ("topology", "algorithm", "compression")
"""Parts of the configuration that mean nothing to the baselines."""


def expand(axes: Mapping[str, Sequence[str]], method: str = "gossip") -> list[tuple[str, ...]]:
    """The overrides of each run.

    Every combination of the axes is a run. The baselines do not depend on topology, algorithm and compression: for each
    combination of the other axes (ranks, partition, seed, ...) there is one run of each baseline.

    Parameters
    ----------
    axes : mapping of key to sequence of str
        The overrides, ``key=value``, that a key takes in turn; an axis of one is set in every run to which it means
        something.
    method : str
        Of a run without an override of ``method``.

    Returns
    -------
    list of tuple of str
        Each run's overrides in the order of the axes, no two alike.

    Examples
    --------
    >>> for overrides in expand({"topology": ["topology=ring", "topology=star"], "seed": ["seed=0"]}):
    ...     print(*overrides)
    topology=ring seed=0
    topology=star seed=0
    seed=0 method=ddp
    seed=0 method=local
    """
    runs: dict[tuple[str, ...], None] = {}
    baselines: dict[tuple[str, ...], None] = {}
    for combination in itertools.product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        own_method = chosen.get("method", f"method={method}").partition("=")[2]
        common = [override for key, override in chosen.items() if key != "method" and not is_gossip_only(key)]
        if own_method not in BASELINES:
            runs[tuple(chosen.values())] = None
        for baseline in BASELINES:
            baselines[(*common, f"method={baseline}")] = None
    return [*runs, *baselines]


def is_gossip_only(key: str) -> bool:
    """Whether an override of ``key`` means nothing to the baselines."""
    return key.lstrip("+~").partition(".")[0].partition("@")[0] in GOSSIP_ONLY


def swept(axes: Mapping[str, Sequence[str]], besides: Iterable[str]) -> list[str]:
    """The keys that take more than one value, but for some."""
    return [key for key, overrides in axes.items() if len(overrides) > 1 and key not in besides]
