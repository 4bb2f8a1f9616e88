"""The runs of a sweep: every combination of its axes, and the baselines once for each setting."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BASELINES = ("ddp", "local")
"""The methods with which every setting is compared: all-reduce, and no exchange at all."""

REFERENCE = "ddp"
"""The baseline to which differences are computed, seed by seed."""

GOSSIP_ONLY = ("topology", "algorithm", "compression")
"""The config sections that do not apply to the baselines."""


@dataclass(frozen=True)
class Run:
    """One run of a sweep, as overrides of the primary config, and the all-reduce run with which it is compared.

    That one has the same ranks, data, seed and other settings that apply to both; for itself, it is the run.
    """

    overrides: tuple[str, ...]
    reference: tuple[str, ...]


def expand(
    axes: Mapping[str, Sequence[str]], method: str = "gossip", variants: Sequence[Sequence[str]] = ((),)
) -> list[Run]:
    """Expand the axes of a sweep into its runs.

    Every combination of the axes is a run. The baselines do not depend on topology, algorithm and compression: for each
    combination of the other axes (ranks, partition, seed, ...) there is one run of each baseline.

    Parameters
    ----------
    axes : mapping of key to sequence of str
        For each key, the overrides ``key=value`` to combine.
    method : str
        The method of a run without an override of ``method``.
    variants : sequence of sequence of str
        Groups of overrides, each of which gossip combines with every combination of the axes.

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
    """Whether an override of ``key`` does not apply to the baselines."""
    return section_of(key) in GOSSIP_ONLY


def section_of(key: str) -> str:
    """Return the config section that an override of ``key`` changes."""
    return key.lstrip("+~").partition("=")[0].partition(".")[0].partition("@")[0]
