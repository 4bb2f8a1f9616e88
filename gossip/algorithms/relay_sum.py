"""RelaySum: every rank's values reach all others along a tree, unmixed, delayed by their distance in steps."""

from __future__ import annotations

from collections.abc import Mapping

import networkx as nx
import numpy as np
import torch
from torch.optim import Optimizer

from gossip.algorithms.base import VALUES, Form, Kept, Requires, WithForm
from gossip.algorithms.bucket_view import Arrived, BucketView
from topologies import Round, Topology
from topologies.analysis.static_rounds import only_graph


class RelaySum(WithForm):
    r"""A uniform average with delays: what arrives from one neighbour in a tree is relayed to the others.

    With :math:`n_{j \to i}` the number of ranks on j's side of the edge between i and j, and :math:`m_{j \to i}` their
    mean as far as i knows:

    .. math::
        m_{i \to j}(t) &= \frac{1}{n_{i \to j}} \Bigl(x_i(t) + u_i(t)
            + \sum_{k \ne j} n_{k \to i}\, m_{k \to i}(t-1) \Bigr) \\
        x_i(t+1) &= \frac1n \Bigl(x_i(t) + u_i(t) + \sum_j n_{j \to i}\, m_{j \to i}(t) \Bigr)
            = \frac1n \sum_j (x_j + u_j)\bigl(t - \max(\tau_{ij} - 1, 0)\bigr)

    where :math:`\tau_{ij}` is the number of edges between i and j, and values before the first step are the initial
    ones. Data that differ between ranks cause no bias. The weights of the topology are not used, only its edges, which
    must form a spanning tree and be the same in every exchange. The mean over ranks at a given time is not kept,
    because ranks receive values late.

    Sends one message along each edge, of which n ranks have n - 1, and keeps as many tensors per bucket as the tree's
    largest degree. The edges are coloured so that no two edges of a rank have the same colour; each colour is a
    channel. Optimizers with a ``pre_average_hook`` cannot be used, because nothing is mixed by the topology's weights.

    Parameters
    ----------
    form : str
        "atc": the messages are awaited before the next forward pass, as above; "awc": they have the whole next
        iteration, whose gradients are still computed at :math:`x_i(t) + u_i(t)`.

    References
    ----------
    Vogels, He, Koloskova, Karimireddy, Lin, Stich and Jaggi, "RelaySum for decentralized deep learning on heterogeneous
    data", NeurIPS 2021, algorithm 1.
    """

    unclipped_because = "relays sums, of which every part must arrive"
    requires = Requires(static=True, symmetric=True, tree=True, prompt=True)

    _size = 1

    def __init__(self, form: Form = "atc") -> None:
        super().__init__(form)
        self._states: tuple[str, ...] = ()
        self._rounds: Mapping[str, Round] = {}
        self._behind = torch.zeros(0)

    def on(self, topology: Topology, delivers: float = 1.0) -> RelaySum:
        del delivers
        bound, tree, size = RelaySum(self.form), only_graph(topology), topology.world_size
        colours = _coloured(tree)
        num_colours = max(colours.values(), default=0) + 1
        bound.sends = (VALUES, *(f"colour_{number}" for number in range(1, num_colours)))  # type: ignore[misc]
        bound._states = tuple(f"relayed_{number}" for number in range(num_colours))
        bound.keeps = dict.fromkeys(bound._states, Kept("mean"))
        partners: list[list[dict[int, float]]] = [[{} for _ in range(size)] for _ in range(num_colours)]
        behind = np.zeros((num_colours, size, 1))
        for edge, colour in colours.items():
            tree.remove_edge(*edge)
            for rank, neighbour in (edge, edge[::-1]):
                partners[colour][rank] = {neighbour: 1.0}
                behind[colour, rank] = len(nx.node_connected_component(tree, neighbour))
            tree.add_edge(*edge)
        bound._rounds = dict(zip(bound.sends, map(Round.from_rows, partners), strict=True))
        bound._behind, bound._size = torch.from_numpy(behind), size
        return bound

    def check_optimizers(self, optimizers: tuple[Optimizer, ...]) -> None:
        for optimizer in optimizers:
            if hasattr(optimizer, "pre_average_hook"):
                raise ValueError(
                    f"algorithm {self.describe()} mixes nothing that {type(optimizer).__name__}.pre_average_hook could "
                    "be shown; choose another algorithm or another optimizer"
                )

    def messages_per_edge(self, step: int) -> int:
        del step
        return 1

    def channel_round(self, channel: str, round_: Round) -> Round:
        del round_
        return self._rounds[channel]

    def begin(self, bucket: BucketView) -> None:
        bucket.kept.update({state: bucket.zeros().copy_(bucket.values) for state in self._states})

    def averaged(self, bucket: BucketView) -> None:
        self.begin(bucket)

    def arrive(self, bucket: BucketView, got: Mapping[str, Arrived]) -> None:
        for state, (channel, message) in zip(self._states, self._messages(bucket).items(), strict=True):
            bucket.kept[state].copy_(message.add_(got[channel].difference))
        bucket.values.copy_(self._total(bucket).div_(self._size))

    def message(self, bucket: BucketView) -> Mapping[str, torch.Tensor]:
        return {name: message.to(bucket.values.dtype) for name, message in self._messages(bucket).items()}

    def _messages(self, bucket: BucketView) -> dict[str, torch.Tensor]:
        """Return the messages by channel; if a rank has no edge of a colour, that message is not sent."""
        total = self._total(bucket)
        return {
            channel: (total - relayed * behind).div_(self._size - behind)
            for channel, (relayed, behind) in zip(self.sends, self._relayed(bucket), strict=True)
        }

    def _total(self, bucket: BucketView) -> torch.Tensor:
        total = bucket.zeros().copy_(bucket.values)
        for relayed, behind in self._relayed(bucket):
            total.add_(relayed * behind)
        return total

    def _relayed(self, bucket: BucketView) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return by colour what has arrived, and the number of ranks it stands for, [..., 1]."""
        ranks, like = bucket.ranks, bucket.kept[self._states[0]]
        rows = self._behind[:, ranks.start : ranks.stop].to(like)
        if bucket.values.dim() == 1:
            rows = rows[:, 0]
        return [(bucket.kept[state], row) for state, row in zip(self._states, rows, strict=True)]


def _coloured(tree: nx.Graph) -> dict[tuple[int, int], int]:
    """Colour the edges with the fewest colours such that no two edges of a node have the same colour."""
    colours: dict[tuple[int, int], int] = {}
    above: dict[int, int] = {}  # the colour of the edge to a node's parent
    for parent, child in nx.bfs_edges(tree, min(tree)):
        used = {above.get(parent, -1), *(colours[edge] for edge in colours if edge[0] == parent)}
        colour = next(number for number in range(len(tree)) if number not in used)
        colours[parent, child] = above[child] = colour
    return colours
