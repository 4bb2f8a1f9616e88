"""The contract table of algorithms: on which topologies, and with which options, each is held to its recursion.

A new algorithm enters by one row of ``ROWS`` and one subclass of :class:`recursions.Recursion`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import networkx as nx
import outer_recursions
import recursions
import torch
from examples import defined
from quadratics import LEARNING_RATE, MOMENTUM, Array, Problem, Sgd
from recursions import PERIOD

import topologies
from gossip.algorithms import ALGORITHMS, Algorithm
from gossip.algorithms.base import Form
from topologies import Topology


class Row(NamedTuple):
    """What the contract knows of an algorithm.

    ``keeps_mean``: whether the average of the replicas follows the average of the updates. ``options``: its arguments.
    ``momentum``: of SGD; None: the optimizer is Adam. ``is_in_step``: whether real processes make their steps together;
    what others compute is held to their own account of it elsewhere.
    """

    recursion: type[recursions.Recursion]
    topologies: tuple[str, ...]
    keeps_mean: bool = True
    options: Mapping[str, Any] = {}
    momentum: float | None = MOMENTUM
    is_in_step: bool = True

    def dense(self, problem: Problem, topology: Topology, sgd: Sgd, max_norm: float | None) -> Array:
        """The values that forward passes read after all steps, [n, d]."""
        form = self.options.get("form", self.recursion.form)
        return self.recursion(problem, topology, sgd, max_norm, form).run()


def in_both_forms(name: str, other: Form, row: Row) -> dict[str, Row]:
    return {name: row, f"{name}({other})": row._replace(options={**row.options, "form": other})}


CHANGING = ("ring", "one_peer_exponential", "base")
EVERY_3 = {"period": PERIOD}
OUTER_ADAM = partial(torch.optim.Adam, lr=0.1)
HEAVY_BALL = partial(torch.optim.SGD, lr=0.7, momentum=0.5, dampening=0.25)
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
ROWS: dict[str, Row] = {
    "adapt_while_communicating": Row(recursions.Recursion, CHANGING),
    "adapt_then_combine": Row(recursions.AdaptThenCombine, CHANGING),
    "asynchronous": Row(recursions.Asynchronous, ("ring", "base"), is_in_step=False),
    "decentlam": Row(recursions.DecentLaM, ("ring", "torus"), momentum=0.0),
    **in_both_forms("diloco", "awc", Row(outer_recursions.DiLoCo, ("complete",), keeps_mean=False, options=EVERY_3)),
    "diloco(outer)": Row(
        outer_recursions.DiLoCoWithAdam, ("complete",), keeps_mean=False, options={**EVERY_3, "outer": OUTER_ADAM}
    ),
    **in_both_forms(
        "diloco(weighted)",
        "awc",
        Row(outer_recursions.WeightedDiLoCo, ("complete",), keeps_mean=False, options={**EVERY_3, "weighted": True}),
    ),
    **in_both_forms(
        "factored_gossip",
        "atc",
        Row(outer_recursions.FactoredGossip, (*CHANGING, "complete"), keeps_mean=False, options=EVERY_3),
    ),
    **in_both_forms(
        "gasloc",
        "awc",
        Row(
            outer_recursions.GASLoC,
            CHANGING,
            keeps_mean=False,
            options={**EVERY_3, "outer_lr": 0.7, "outer_momentum": 0.3},
        ),
    ),
    **in_both_forms(
        "factored_gossip(rounds, kappa)",
        "atc",
        Row(
            outer_recursions.CorrectedFactoredGossip,
            CHANGING,
            keeps_mean=False,
            options={**EVERY_3, "rounds": PERIOD, "kappa": 0.4},
        ),
    ),
    "factored_gossip(overlap)": Row(
        outer_recursions.LateFactoredGossip, CHANGING, keeps_mean=False, options={**EVERY_3, "overlap": 2}
    ),
    "factored_gossip(outer)": Row(
        outer_recursions.FactoredGossipWithAdam, CHANGING, keeps_mean=False, options={**EVERY_3, "outer": OUTER_ADAM}
    ),
    "gasloc(outer)": Row(
        outer_recursions.GASLoCWithMomentum, CHANGING, keeps_mean=False, options={**EVERY_3, "outer": HEAVY_BALL}
    ),
    **in_both_forms(
        "desloc",
        "awc",
        Row(
            recursions.DESLOC,
            CHANGING,
            options={"period": 1, "moments": {"exp_avg": 2, "exp_avg_sq": 3}, "form": "atc"},
            momentum=None,
        ),
    ),
    "desloc(momentum)": Row(
        recursions.DESLOCOfMomentum, CHANGING, options={"period": 1, "moments": {"momentum_buffer": 3}, "form": "awc"}
    ),
    **in_both_forms("gossip_pga", "atc", Row(recursions.GossipPGA, CHANGING, options=EVERY_3)),
    **in_both_forms(
        "noloco", "awc", Row(outer_recursions.NoLoCo, (*CHANGING, "random_matching"), keeps_mean=False, options=EVERY_3)
    ),
    **in_both_forms("relay_sum", "awc", Row(recursions.RelaySum, ("path", "star"), keeps_mean=False)),
    **in_both_forms(
        "slowmo", "atc", Row(outer_recursions.SlowMo, CHANGING, keeps_mean=False, options={**EVERY_3, "slow_lr": 0.7})
    ),
    **in_both_forms(
        "sparse_loco",
        "awc",
        Row(outer_recursions.SparseLoCo, ("complete",), keeps_mean=False, options={**EVERY_3, "ratio": 0.5, "bits": 4}),
    ),
    "streaming_diloco": Row(
        outer_recursions.StreamingDiLoCo,
        ("complete",),
        keeps_mean=False,
        options={"period": 4, "parts": 2, "overlap": 2},
    ),
    "streaming_diloco(outer)": Row(
        outer_recursions.StreamingDiLoCo,
        ("complete",),
        keeps_mean=False,
        options={"period": 4, "parts": 2, "overlap": 2, "outer": NESTEROV},
    ),
    "streaming_diloco(eager)": Row(
        outer_recursions.EagerDiLoCo,
        ("complete",),
        keeps_mean=False,
        options={"period": 4, "parts": 2, "overlap": 2, "eager": True},
    ),
    "exact_diffusion": Row(recursions.ExactDiffusion, ("ring", "torus")),
    "extra": Row(recursions.Extra, ("ring", "torus")),
    "momentum_exchange": Row(recursions.MomentumExchange, CHANGING),
    "push_sum": Row(recursions.PushSum, ("pushed", "ring", "one_peer_exponential"), keeps_mean=False),
    "push_sum(weighted)": Row(
        recursions.WeightedPushSum,
        ("pushed", "ring", "one_peer_exponential"),
        keeps_mean=False,
        options={"weighted": True},
    ),
    **in_both_forms("adam_tracking", "atc", Row(recursions.AdamTracking, CHANGING, momentum=None)),
    **in_both_forms("gradient_tracking", "atc", Row(recursions.GradientTracking, CHANGING)),
    **in_both_forms("integral_correction", "atc", Row(recursions.IntegralCorrection, CHANGING)),
    **in_both_forms("momentum_tracking", "atc", Row(recursions.MomentumTracking, CHANGING)),
    **in_both_forms("quasi_global_integral", "atc", Row(recursions.QuasiGlobalIntegral, CHANGING, momentum=0.0)),
    **in_both_forms("quasi_global_momentum", "atc", Row(recursions.QuasiGlobalMomentum, CHANGING, momentum=0.0)),
    "heavy_ball": Row(recursions.HeavyBall, CHANGING),  # that of the page on algorithms of one's own
    **in_both_forms(
        "integral_correction(second moments)",
        "atc",
        Row(recursions.SharedSecondMoments, CHANGING, options={"second_moment": "exchange"}, momentum=None),
    ),
}


def make_algorithm(label: str) -> Algorithm:
    """That of a row, whose label is its name and what else tells it from others."""
    if label == "heavy_ball":
        return defined("docs/extending/algorithm.md", 0)["HeavyBall"]()
    return ALGORITHMS.get(label.partition("(")[0])(**ROWS[label].options)


def optimizer_for(label: str) -> Callable[..., torch.optim.Optimizer]:
    """That of a row, of torch."""
    momentum = ROWS[label].momentum
    if momentum is None:
        return partial(torch.optim.Adam, lr=LEARNING_RATE)
    return partial(torch.optim.SGD, lr=LEARNING_RATE, momentum=momentum)


def make_topology(name: str, world_size: int) -> Topology:
    """A family's; "pushed" is a directed graph with weights of which only the columns sum to 1."""
    if name != "pushed":
        return topologies.build(name, world_size)
    graph = nx.DiGraph([(rank, (rank + 1) % world_size) for rank in range(world_size)])
    graph.add_edges_from([(0, 2 % world_size), (1, 3 % world_size)])
    graph.remove_edges_from(nx.selfloop_edges(graph))
    return Topology.from_graph(graph, weights="push_sum")
