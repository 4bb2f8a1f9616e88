"""Edge colouring: the edges of a graph split into matchings, as few as is cheap to find."""

import itertools
import random
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from topologies.matrix_storage import IntArray, rank_array
from topologies.validation import MAX_WORLD_SIZE

#: How often an edge that finds no colour may recolour a path at one of its ends before one more colour is opened.
#: About every second attempt succeeds where a colouring exists.
_ATTEMPTS = 50


def edge_colouring(edges: npt.ArrayLike) -> list[IntArray]:
    """Return matchings, each a sorted array of pairs ``[pairs, 2]``, that hold every edge exactly once.

    With d the largest degree, there are at most d + 1 matchings on any graph (Vizing). There are exactly d, which is
    the fewest possible, on a bipartite graph (Konig), and n - 1 or n on the complete graph of an even or odd number
    n of nodes. On other graphs d is tried first, and found on most. The result depends on the set of edges alone.

    Every edge (u, v) takes a colour that is free at both ends. If there is none, the path from v in two colours, one
    free at u and one free at v, swaps them; on a bipartite graph it never ends at u, and the colour free at u becomes
    free at v. Where it does end at u for every two colours, another path at u is swapped first. Edges that find no
    colour even so get one more colour and the fans of Misra and Gries, which never fail.

    It takes edges between nodes 0 .. n-1, shape ``[edges, 2]``, in either direction and without loops.

    References
    ----------
    Konig, "Uber Graphen und ihre Anwendung auf Determinantentheorie und Mengenlehre", 1916.
    Misra and Gries, "A constructive proof of Vizing's theorem", 1992.

    Examples
    --------
    >>> [matching.tolist() for matching in edge_colouring([(0, 1), (1, 2), (2, 3), (0, 3)])]
    [[[0, 1], [2, 3]], [[0, 3], [1, 2]]]
    """
    edges = _sorted_edges(edges)
    if not len(edges):
        return []
    num_nodes = int(edges.max()) + 1
    if 2 * len(edges) == num_nodes * (num_nodes - 1):
        return _circle_method(num_nodes)
    return _colour_by_paths(num_nodes, edges)


def _sorted_edges(pairs: npt.ArrayLike) -> IntArray:
    edges = rank_array("graph", pairs, MAX_WORLD_SIZE).reshape(-1, 2)
    loops = edges[:, 0] == edges[:, 1]
    if loops.any():
        raise ValueError(f"graph has a loop at node {edges[loops][0, 0]}, a matching has none; remove it")
    return np.unique(np.sort(edges, axis=1), axis=0)


def _circle_method(num_nodes: int) -> list[IntArray]:
    """Return the rounds of a tournament of all against all: one player stays, the others move around a circle.

    In round r the players i and j of the circle meet if i + j = 2 r modulo its size, which is odd; player r is
    left over and meets the one who stays, who is missing if the number of players is odd.
    """
    circle = num_nodes - 1 + num_nodes % 2
    hops = np.arange(1, (circle + 1) // 2)
    matchings = []
    for meeting in range(circle):
        pairs = np.stack(((meeting + hops) % circle, (meeting - hops) % circle), axis=1)
        if circle < num_nodes:
            pairs = np.concatenate((pairs, [[meeting, circle]]))
        pairs.sort(axis=1)
        matchings.append(pairs[np.argsort(pairs[:, 0])])
    return matchings


def _colour_by_paths(num_nodes: int, edges: IntArray) -> list[IntArray]:
    degree = int(np.bincount(edges.reshape(-1)).max())
    colouring = _Colouring(num_nodes, degree)
    # A colour holds at most half of the nodes: with more edges than that no d colours suffice.
    overfull = len(edges) > degree * (num_nodes // 2)
    postponed = []
    for u, v in edges.tolist():
        if not colouring.join(u, v, attempts=0 if overfull else _ATTEMPTS):
            postponed.append((u, v))
    if postponed:
        colouring.free = [free | 1 << degree for free in colouring.free]  # one more colour
        for u, v in postponed:
            colouring.join_by_fan(u, v)
    colours = np.array([colouring.colour_of[u][v] for u, v in edges.tolist()])
    # A stable order keeps the edges of every colour sorted.
    order = np.argsort(colours, kind="stable")
    return np.split(edges[order], np.flatnonzero(np.diff(colours[order])) + 1)


class _Colouring:
    """A proper colouring of some of the edges; colours are 0 .. num_colours - 1."""

    def __init__(self, num_nodes: int, num_colours: int) -> None:
        #: Per node: the colour of the edge to another node, and the node at the other end of a colour's edge.
        self.colour_of: list[dict[int, int]] = [{} for _ in range(num_nodes)]
        self.across: list[dict[int, int]] = [{} for _ in range(num_nodes)]
        #: Per node: the set of colours that no edge of it has, as the bits of an integer.
        self.free = [(1 << num_colours) - 1] * num_nodes
        self.random = random.Random(0)  # its own generator: the same choices for the same edges, everywhere

    def join(self, u: int, v: int, *, attempts: int) -> bool:
        """Colour the edge (u, v) by swapping colours along paths; return whether that was possible."""
        if self._join_by_path(u, v):
            return True
        for _ in range(attempts):
            # Another colour becomes free at u; which one is as good as any.
            used, unused = self.random.choice(sorted(self.across[u])), _lowest(self.free[u])
            self._swap(self._path(u, used, unused), used, unused)
            if self._join_by_path(u, v):
                return True
        return False

    def join_by_fan(self, u: int, v: int) -> None:
        """Colour the edge (u, v) with num_colours larger than all degrees.

        In a fan v = w_0, w_1, .. of neighbours of u, the colour of (u, w_(i+1)) is free at w_i; so the edges to w_0
        .. w_k can each take the colour of the next one, and leave the edge to w_k for a new colour.
        """
        fan = [v]
        while (following := self._next_in_fan(u, fan)) is not None:
            fan.append(following)
        at_u, at_last = _lowest(self.free[u]), _lowest(self.free[fan[-1]])
        self._swap(self._path(u, at_last, at_u), at_last, at_u)  # now at_last is free at u too
        last = 0
        while not self.free[fan[last]] >> at_last & 1:
            last += 1
            # The theorem of Misra and Gries: the fan is intact up to a node at which the colour is free.
            assert self.free[fan[last - 1]] >> self.colour_of[u][fan[last]] & 1
        for node, following in itertools.pairwise(fan[: last + 1]):
            colour = self.colour_of[u][following]
            self._clear(u, following)
            self._set(u, node, colour)
        self._set(u, fan[last], at_last)

    def _next_in_fan(self, u: int, fan: list[int]) -> int | None:
        for colour in _bits(self.free[fan[-1]]):
            node = self.across[u].get(colour)
            if node is not None and node not in fan:
                return node
        return None

    def _join_by_path(self, u: int, v: int) -> bool:
        if common := self.free[u] & self.free[v]:
            self._set(u, v, _lowest(common))
            return True
        for at_u in _bits(self.free[u]):
            for at_v in _bits(self.free[v]):
                path = self._path(v, at_u, at_v)
                if path[-1] != u:
                    self._swap(path, at_u, at_v)
                    self._set(u, v, at_u)
                    return True
        return False

    def _path(self, node: int, first: int, second: int) -> list[int]:
        """Return the nodes of the path from ``node``, where ``second`` is free, in the two colours in turn."""
        path = [node]
        while (following := self.across[path[-1]].get(first)) is not None:
            path.append(following)
            first, second = second, first
        return path

    def _swap(self, path: list[int], first: int, second: int) -> None:
        """Swap the two colours of a path that starts with ``first`` and cannot be continued at either end."""
        steps = list(itertools.pairwise(path))
        for u, v in steps:
            self._clear(u, v)
        for u, v in steps:
            self._set(u, v, second)
            first, second = second, first

    def _set(self, u: int, v: int, colour: int) -> None:
        self.across[u][colour], self.across[v][colour] = v, u
        self.colour_of[u][v] = self.colour_of[v][u] = colour
        self.free[u] &= ~(1 << colour)
        self.free[v] &= ~(1 << colour)

    def _clear(self, u: int, v: int) -> None:
        colour = self.colour_of[u].pop(v)
        del self.colour_of[v][u], self.across[u][colour], self.across[v][colour]
        self.free[u] |= 1 << colour
        self.free[v] |= 1 << colour


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _bits(bits: int) -> Iterator[int]:
    while bits:
        yield _lowest(bits)
        bits &= bits - 1
