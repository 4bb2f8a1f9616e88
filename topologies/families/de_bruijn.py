"""De Bruijn graphs: one directed round, the same forever, that averages exactly."""

from topologies.round import Round
from topologies.topology import Topology, register
from topologies.validation import MAX_WORLD_SIZE, check_integer, check_served, powers


@register("de_bruijn", variants=lambda *_: [{"p": p} for p in (2, 3, 4)])
def de_bruijn(world_size: int, *, p: int = 2) -> Topology:
    """Rank i reads the p ranks (p i + r) mod n, r = 0 .. p - 1, weights 1/p: exact for n = p^t after t rounds.

    In base p a rank reads those that follow when its highest digit is dropped and any digit is appended. Where it
    reads itself, that weight is what it keeps; other ranks keep nothing. ``W - J`` is nilpotent: its eigenvalues
    are all 0, although ``||W - J||_2 = 1`` for n > p, so a round alone need not bring the ranks closer together.

    Properties
    ----------
    sizes : n = p^t
    degree : at most p
    period : 1
    exact : after t rounds
    rate : SLEM 0; norm of W - J 1 for n > p; beta 0 after t rounds
    weights : 1/p, directed for n > p, doubly stochastic

    Parameters
    ----------
    p
        Ranks read in a round, at least 2. ``world_size`` is a power of it.

    References
    ----------
    Delvenne, Carli and Zampieri, "Optimal strategies in the average consensus problem", 2009.

    Examples
    --------
    >>> round_ = topologies.build("de_bruijn", 8).round(0)
    >>> round_.neighbours(3), round_.targets(3)
    ({6: 0.5, 7: 0.5}, (1, 5))
    """
    p = check_integer("p", p, minimum=2)
    served = powers(p, MAX_WORLD_SIZE)
    check_served("de_bruijn", world_size, f"a power of p = {p}", served.__contains__, sparse=served)
    weight = 1.0 / p

    def row(rank: int) -> dict[int, float]:
        # p divides n, so the p ranks read follow each other without a wrap. What is left of 1 is 0, but for rounding.
        first = p * rank % world_size
        return {rank: 0.0} | dict.fromkeys(range(first, first + p), weight)

    def readers(rank: int) -> tuple[int, ...]:
        stride = world_size // p
        return tuple(other for other in range(rank // p, world_size, stride) if other != rank)

    round_ = Round.from_formula(world_size, row, readers=readers)
    return Topology(world_size, lambda _: round_, 1, promised_exact_after=served.index(world_size))
