"""The largest stable learning rates of gossip and of integral correction, and how large its gain may be."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field, PositiveInt, field_validator

import topologies
from gossip import IntegralCorrection
from gossip.algorithms.base import Form
from gossip.algorithms.integral_correction import steps_to_mix
from gossip.lab.benchmarks.benchmark import BenchmarkSettings, Place, Record, Rows, RowsBenchmark, Write
from gossip.lab.experiments.run_figures import drawn
from gossip.lab.experiments.validated_models import OneOf
from topologies import Topology
from topologies.analysis.static_rounds import is_static_and_symmetric

Array = np.ndarray[Any, np.dtype[np.float64]]
FORMS: tuple[Form, ...] = ("awc", "atc")
LARGEST = 2.0
CONDITION = 100.0
_SAMPLED_ROUNDS = 200
_GRID = 40


class StabilitySettings(BenchmarkSettings):
    """The settings of a run."""

    world_size: int = 1
    families: tuple[Annotated[str, OneOf(topologies.available())], ...] = Field(
        tuple(topologies.available()), min_length=1, description="of topologies"
    )
    sizes: tuple[Annotated[PositiveInt, Field(strict=False)], ...] = Field(
        (2, 4, 8, 16, 32, 64), min_length=1, description="numbers of ranks"
    )
    figure: Path | None = Field(None, description="file of the figure, which is drawn if it is given")

    @field_validator("families", "sizes", mode="before")
    @classmethod
    def _split(cls, given: Iterable[Any]) -> tuple[str, ...]:
        """Take ``2,4`` for two values."""
        return tuple(part for value in given for part in str(value).split(","))


class Stability(RowsBenchmark[StabilitySettings]):
    """One rank computes, for a quadratic that all ranks of a topology share."""

    settings = StabilitySettings
    title = "The largest stable learning rates"
    number_format = ".3f"

    def work(self, case: StabilitySettings, place: Place, write: Write) -> None:  # noqa: ARG002
        """Write the largest rates of both forms, alone and with an integral correction, for each topology."""
        for name, size in itertools.product(case.families, case.sizes):
            topology = built(name, size)
            if topology is None:
                continue
            row: Record = {"topology": name, "ranks": size}
            for form in FORMS:
                row[form] = largest_rate(topology, form, Gain())
                row[f"{form} with correction"] = largest_rate(topology, form, default_gain(topology, form))
            write(row)

    def draw(self, settings: StabilitySettings, results: Sequence[Rows], folder: Path) -> None:  # noqa: ARG002
        """Draw the largest stable gains against the steps to mix, where the default gains follow from these."""
        if settings.figure is None:
            return
        rows = [(row, topologies.build(row["topology"], row["ranks"])) for row in results[0].rows]
        rows = [(row, topology) for row, topology in rows if not is_static_and_symmetric(topology)]
        steps = [steps_to_mix(topology) for _, topology in rows]
        line = np.geomspace(1, max([2.0, *steps]), 50)
        settings.figure.parent.mkdir(parents=True, exist_ok=True)
        with drawn(settings.figure, 6.4, 4.2) as figure:
            axes = figure.subplots()
            for form, (marker, factor, colour) in zip(FORMS, (("o", 4, "C0"), ("^", 2, "C1")), strict=True):
                kappas = [largest_kappa(topology, form, row[form]) for row, topology in rows]
                axes.plot(steps, kappas, marker, color=colour, markersize=4, alpha=0.7, label=f"{form}: largest stable")
                label = rf"{form}: default, 1 / {factor}$\tau$"
                axes.plot(line, 1 / (factor * line), color=colour, linewidth=1, label=label)
            axes.set(xscale="log", yscale="log", xlabel=r"steps to mix, $\tau$", ylabel=r"gain $\kappa$")
            axes.legend()


class Gain(NamedTuple):
    """None at all is gossip itself."""

    gamma: float = 1.0
    kappa: float | None = None


@functools.lru_cache(maxsize=4)
def laplacians(topology: Topology) -> tuple[Array, ...]:
    """W - 1 of each round of a period; without one, of some rounds."""
    rounds = range(topology.period or _SAMPLED_ROUNDS)
    return tuple(topology.round(step).matrix() - np.eye(topology.world_size) for step in rounds)


def growth(topology: Topology, form: Form, gain: Gain, step: float) -> float:
    r"""By what a mode of curvature times rate ``step`` grows, per step, at worst.

    The state of all ranks is (x, c), of which c sums to zero, and one step with :math:`L_t = W_t - 1` is

    - awc: :math:`c \leftarrow c + \kappa L_{t-1} x`, :math:`x \leftarrow (1 - s + \gamma L_{t-1}) x + c`;
    - atc: :math:`z = (1 - s) x + c`, :math:`c \leftarrow c + \kappa L_t z`, :math:`x \leftarrow (1 + \gamma L_t) z`.
    """
    n = topology.world_size
    one, average = np.eye(n), np.full((n, n), 1 / n)
    total, logarithm = np.eye(n if gain.kappa is None else 2 * n), 0.0
    rounds = laplacians(topology)
    for laplacian in rounds:
        if gain.kappa is None:
            matrix = laplacian + (1 - step) * one if form == "awc" else (one + laplacian) * (1 - step)
        elif form == "awc":
            correction = np.hstack([gain.kappa * laplacian, one - average])
            matrix = np.vstack(
                [np.hstack([(1 - step) * one + gain.gamma * laplacian, 0 * one]) + correction, correction]
            )
        else:
            between = np.hstack([(1 - step) * one, one - average])
            correction = np.hstack([0 * one, one - average]) + gain.kappa * laplacian @ between
            matrix = np.vstack([(one + gain.gamma * laplacian) @ between, correction])
        total = matrix @ total
        scale = np.abs(total).max()
        total, logarithm = total / scale, logarithm + np.log(scale)
    largest = np.abs(np.linalg.eigvals(total)).max()
    return float(np.exp((np.log(max(largest, 1e-300)) + logarithm) / len(rounds)))


def largest_until(is_stable: Callable[[float], bool], grid: Array) -> float:
    """The largest number up to which all are stable: by a grid, then by halves."""
    below = 0.0
    for value in grid:
        if not is_stable(float(value)):
            above = float(value)
            for _ in range(8):
                middle = (below + above) / 2
                below, above = (middle, above) if is_stable(middle) else (below, middle)
            return below
        below = float(value)
    return below


def largest_rate(topology: Topology, form: Form, gain: Gain) -> float:
    """For eigenvalues from 1 / CONDITION to 1: what is stable at a rate is so for all that lie below."""
    grid = np.geomspace(LARGEST / CONDITION / 4, 0.999 * LARGEST, _GRID)
    return largest_until(lambda rate: growth(topology, form, gain, rate) < 1 + 1e-9, grid)


def largest_kappa(topology: Topology, form: Form, of_gossip: float) -> float:
    """With gamma = 1 - kappa / 2, for all eigenvalues at nine tenths of the largest rate of gossip."""
    steps = np.geomspace(0.9 * of_gossip / CONDITION, 0.9 * of_gossip, 7)

    def is_stable(kappa: float) -> bool:
        return all(growth(topology, form, Gain(1 - kappa / 2, kappa), step) < 1 + 1e-9 for step in steps)

    return largest_until(is_stable, np.geomspace(1e-3, 1.0, _GRID))


def default_gain(topology: Topology, form: Form) -> Gain:
    """That of the algorithm."""
    return Gain(*IntegralCorrection(form).on(topology).gains(0))


def built(name: str, world_size: int) -> Topology | None:
    """None if the family does not serve that size, or needs more to be told; or keeps no mean."""
    try:
        topology = topologies.build(name, world_size)
        default_gain(topology, "awc")
    except (ValueError, TypeError):
        return None
    return topology if topology.doubly_stochastic else None
