"""Which runs a sweep is made of: every combination of its axes, and the baselines once for each setting."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

BASELINES = ("ddp", "local")
"""The methods that every setting is compared with: all-reduce, and no exchange at all."""

REFERENCE = "ddp"
"""The baseline from which differences are taken, seed by seed."""

GOSSIP_ONLY = ("topology", "algorithm", "compression")
"""Parts of the configuration that mean nothing to the baselines."""


@dataclass(frozen=True)
class Run:
    """What makes one run of the primary configuration.

    Attributes
    ----------
    overrides : tuple of str
    reference : tuple of str
        The overrides of the all-reduce run that this one is compared with: same ranks, data, seed and what else both
        have; its own, of that run itself.
    """

    overrides: tuple[str, ...]
    reference: tuple[str, ...]


def expand(
    axes: Mapping[str, Sequence[str]], method: str = "gossip", variants: Sequence[Sequence[str]] = ((),)
) -> list[Run]:
    """The runs of a sweep.

    Every combination of the axes is a run. The baselines do not depend on topology, algorithm and compression: for each
    combination of the other axes (ranks, partition, seed, ...) there is one run of each baseline.

    Parameters
    ----------
    axes : mapping of key to sequence of str
        The overrides, ``key=value``, that a key takes in turn; an axis of one is set in every run to which it means
        something.
    method : str
        Of a run without an override of ``method``.
    variants : sequence of sequence of str
        Overrides that go together, and that each combination takes in turn; the baselines have no part in them.

    Returns
    -------
    list of Run
        With overrides in the order of the axes, no two alike.

    Examples
    --------
    >>> for run in expand({"topology": ["topology=ring", "topology=star"], "seed": ["seed=0"]}):
    ...     print(*run.overrides)
    topology=ring seed=0
    topology=star seed=0
    seed=0 method=ddp
    seed=0 method=local
    """
    runs: dict[Run, None] = {}
    baselines: dict[Run, None] = {}
    for combination in itertools.product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        own_method = chosen.get("method", f"method={method}").partition("=")[2]
        common = tuple(override for key, override in chosen.items() if key != "method" and not is_gossip_only(key))
        reference = (*common, f"method={REFERENCE}")
        if own_method not in BASELINES:
            for variant in variants:
                runs[Run((*chosen.values(), *variant), reference)] = None
        for baseline in BASELINES:
            baselines[Run((*common, f"method={baseline}"), reference)] = None
    return [*runs, *baselines]


def is_gossip_only(key: str) -> bool:
    """Whether an override of ``key`` means nothing to the baselines."""
    return section_of(key) in GOSSIP_ONLY


def section_of(key: str) -> str:
    """The part of the configuration that an override of ``key`` changes."""
    return key.lstrip("+~").partition("=")[0].partition(".")[0].partition("@")[0]


def swept(axes: Mapping[str, Sequence[str]], besides: Iterable[str]) -> list[str]:
    """The keys that take more than one value, but for some."""
    return [key for key, overrides in axes.items() if len(overrides) > 1 and key not in besides]
