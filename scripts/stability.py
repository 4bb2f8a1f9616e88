"""The largest stable learning rates of gossip and of integral correction, and how large its gain may be.

    python scripts/stability.py [--families ring,base] [--sizes 2,4,8] [--figure docs/gain.svg]

Prints one line for each family and number of ranks: for a quadratic with eigenvalues from 0.01 to 1, shared by all
ranks, the largest rate up to 2 (where gradient descent ends) below which nothing diverges, for adapt while
communicating, adapt then combine, and each with an integral correction by its default gains. The figure shows against
the steps in which a schedule mixes the largest kappa, with gamma = 1 - kappa / 2, that is stable at nine tenths of the
largest rate of gossip, and the default ones.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

import topologies
from gossip.algorithms import IntegralCorrection
from gossip.algorithms.base import Form
from gossip.algorithms.integral_correction import steps_to_mix
from topologies import Topology
from topologies.analysis.static_rounds import is_static_and_symmetric

Array = np.ndarray[Any, np.dtype[np.float64]]
FORMS: tuple[Form, ...] = ("awc", "atc")
LARGEST = 2.0
CONDITION = 100.0
_SAMPLED_ROUNDS = 200
_GRID = 40


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

    def is_stable(rate: float) -> bool:
        return growth(topology, form, gain, rate) < 1 + 1e-9

    grid = np.geomspace(LARGEST / CONDITION / 4, 0.999 * LARGEST, _GRID)
    return largest_until(is_stable, grid)


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


def draw(found: list[tuple[float, Form, float]], path: Path) -> None:
    """Points of (steps to mix, form, kappa), and the default gains as lines."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for form, marker, factor in (("awc", "o", 4), ("atc", "^", 2)):
        steps, kappas = zip(*((steps, kappa) for steps, kind, kappa in found if kind == form), strict=True)
        colour = {"awc": "C0", "atc": "C1"}[form]
        axes.plot(steps, kappas, marker, color=colour, markersize=4, alpha=0.7, label=f"{form}: largest stable")
        line = np.geomspace(1, max(steps), 50)
        axes.plot(line, 1 / (factor * line), color=colour, linewidth=1, label=rf"{form}: default, 1 / {factor}$\tau$")
    axes.set(xscale="log", yscale="log", xlabel=r"steps to mix, $\tau$", ylabel=r"gain $\kappa$")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=lambda text: text.split(","), default=topologies.available())
    parser.add_argument(
        "--sizes", type=lambda text: [int(size) for size in text.split(",")], default=[2, 4, 8, 16, 32, 64]
    )
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    print("| topology | ranks | awc | with correction | atc | with correction |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    found: list[tuple[float, Form, float]] = []
    for name in arguments.families:
        for size in arguments.sizes:
            topology = built(name, size)
            if topology is None:
                continue
            cells = []
            for form in FORMS:
                of_gossip = largest_rate(topology, form, Gain())
                cells += [of_gossip, largest_rate(topology, form, default_gain(topology, form))]
                if arguments.figure is not None and not is_static_and_symmetric(topology):
                    found.append((steps_to_mix(topology), form, largest_kappa(topology, form, of_gossip)))
            print(f"| {name} | {size} | " + " | ".join(f"{rate:.3f}" for rate in cells) + " |", flush=True)
    if arguments.figure is not None:
        draw(found, arguments.figure)


if __name__ == "__main__":
    main()
