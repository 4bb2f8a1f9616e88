# %% [markdown]
# # Choosing a topology
#
# You have n workers, each with its own copy of a model, and they should keep close to each other. Who talks to whom,
# and when? This notebook goes from a single round to a ranking by predicted time, for n = 24 workers on 3 nodes of 8,
# with the package `topologies` alone.
#
# To see your cluster, change the numbers in capitals and run it again. The `assert` lines hold the text to the numbers:
# where one fails, the text beside it is not true of yours.

# %%
import tempfile
from pathlib import Path

import numpy as np
from IPython.display import SVG, display

import topologies
from topologies import analysis, build

WORLD_SIZE = 24
LOCAL_SIZE = 8  # ranks per node


def show(draw):
    """Display what ``draw(path)`` writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.svg"
        draw(path)
        display(SVG(path.read_text()))


def print_first(found, num_lines):
    """Print the first lines of a long table."""
    lines = str(found).splitlines()
    print(*lines[:num_lines], f"... and {len(lines) - num_lines} more", sep="\n")


# %% [markdown]
# ## 1. What is a round?
#
# In a round every worker replaces what it has by a weighted mean of its own and of what it gets from some others,
# $x_i \leftarrow \sum_j W_{ij} x_j$. A topology is the schedule of these matrices $W$. A **ring** is the same round
# over and over; **one-peer exponential** changes partners: in round t a worker reads from the one
# $2^{t \bmod \tau}$ places further on, $\tau = \lceil \log_2 n \rceil$. The figures show the rounds, their matrices,
# and how much of a disagreement is left.

# %%
for name in ("ring", "one_peer_exponential"):
    show(lambda path, name=name: topologies.draw(build(name, 8), path))

# %% [markdown]
# ## 2. How fast do the workers agree?
#
# `compare` measures it for the **worst** start: $\lVert W_{k-1} \cdots W_0 - J \rVert_2$, where $J$ is the exact mean,
# is the largest share of a disagreement that k rounds can leave. Bytes are counted in messages, a message being one
# model; of a family with options it tries those worth trying.

# %%
NAMES = ["complete", "base", "one_peer_exponential", "exponential", "torus", "star", "ring"]
comparison = topologies.compare(NAMES, world_size=WORLD_SIZE)
print(comparison)
show(lambda path: topologies.draw_comparison(comparison, path))
row_of = {row.topology: row for row in comparison.rows}
assert row_of["complete"].rounds == 1
assert row_of["complete"].bytes == min(row.bytes for row in comparison.rows)
assert row_of["base"].exact_after is not None
assert row_of["base"].max_sends == 1
assert max(comparison.rows, key=lambda row: row.rounds).topology == "ring"

# %% [markdown]
# - `complete` is an all-reduce: exact in one round, and none of the others agrees with fewer bytes (its ring sends
#   2 (n - 1) / n messages per worker, though each worker has n - 1 partners). Keep that in mind: gossip does not win on
#   bytes to agreement. What it wins is in section 5.
# - `base` sends at most one message per worker and round and is *exact* at the end of each period.
# - The ring, the best known of them, takes the most rounds.
#
# ### Four traps
#
# **Eigenvalues mislead for directed graphs.** The second largest modulus of an eigenvalue (SLEM) is the rate in the
# long run. If W is not symmetric, it says nothing about the first rounds; the singular value `beta` does.

# %%
de_bruijn = build("de_bruijn", 16)
print(f"SLEM {analysis.slem(de_bruijn):.3f}, beta of one round {analysis.beta(de_bruijn, 1):.3f}")
errors = analysis.consensus_errors(de_bruijn, 5).round(3).tolist()
print("left after 0, 1, 2, ... rounds:", errors)
assert analysis.slem(de_bruijn) < 1e-3
assert errors == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]

# %% [markdown]
# SLEM says "all is done in one round". In truth some disagreement passes three rounds untouched, and the fourth removes
# all that is left. Judge by the curve.
#
# **Exactness holds from a period boundary.** Start a schedule elsewhere (a run that resumes without restoring the
# round, say) and it can take longer.

# %%
base = build("base", WORLD_SIZE)
from_each_start = [analysis.exact_after(base, start=start) for start in range(base.period)]
print(f"base, period {base.period}: exact after {from_each_start} rounds from round 0, 1, 2, ...")
assert from_each_start[0] == base.period == min(from_each_start) < max(from_each_start)

# %% [markdown]
# **One start proves nothing.** Let rank 0 hold 1 and all others 0, and run the star, whose centre is rank 0. Then let
# rank 1 hold the 1 instead.

# %%
star = build("star", WORLD_SIZE)
left_from = {}
for holder in (0, 1):
    values = np.eye(WORLD_SIZE)[holder]
    before = np.linalg.norm(values - values.mean())
    left_from[holder] = np.linalg.norm(star.round(0).mix(values) - values.mean()) / before
    print(f"rank {holder} holds the 1: {left_from[holder]:.3f} of the disagreement is left after one round")
print(f"worst start: {analysis.beta(star, 1):.3f} after one round; {analysis.rounds_to(star, 0.01)} rounds to 1 %")
assert left_from[0] < 1e-12
assert left_from[1] > 0.9

# %% [markdown]
# From the centre the star looks perfect, from a leaf it is close to the worst case. All figures of `topologies` are for
# the worst start.
#
# **n matters.** One-peer exponential is exact for n = 2^k only; `base` is exact for every n, with one message per round
# at most, but how soon depends on n.

# %%
print(" n   one_peer_exponential     base")
for world_size in (15, 16, 17, 23, 24, 31, 32, 33):
    one_peer = build("one_peer_exponential", world_size)
    exact = "never exact" if one_peer.exact_after is None else f"exact after {one_peer.exact_after}"
    exact_base = build("base", world_size).exact_after
    print(f"{world_size}   {exact:<14}{analysis.rounds_to(one_peer, 0.01):>3} to 1 %   exact after {exact_base}")
    assert (one_peer.exact_after is not None) == (world_size in (16, 32))
    assert exact_base is not None

# %% [markdown]
# ## 3. Bytes instead of rounds
#
# A round of `exponential` sends several messages per worker, one of `one_peer_exponential` one. Per round the first
# looks better, per message it is not. (In the figure above that is the right half.)

# %%
for name in ("exponential", "one_peer_exponential"):
    row = row_of[name]
    print(
        f"{name:>20}: messages a round {row.bytes_per_round:g}, factor per round {row.rate:.3f}, "
        f"per message {row.rate_per_byte:.3f}; {row.rounds} rounds and {row.bytes:g} messages to 1 %"
    )
dense, sparse = row_of["exponential"], row_of["one_peer_exponential"]
assert dense.rate < sparse.rate
assert dense.rounds < sparse.rounds
assert dense.rate_per_byte > sparse.rate_per_byte
assert dense.bytes > sparse.bytes

# %% [markdown]
# ## 4. Nodes and the network
#
# Inside a node messages are almost free, so count those that cross the network. Ranks 0 to 7 are node 0, and so on.
# What there is for it:
#
# - **placement**: `permuted` runs the same schedule with the ranks in other places;
# - **`local_global`**: an all-reduce inside each node, then one among those with the same place on each node;
# - **`product`**: one topology between the nodes and another one inside, both in the same round.

# %%
NUM_NODES = WORLD_SIZE // LOCAL_SIZE
around_the_nodes = [node * LOCAL_SIZE + place for place in range(LOCAL_SIZE) for node in range(NUM_NODES)]
placed = {
    "ring": build("ring", WORLD_SIZE),
    "ring, ranks dealt out": build("ring", WORLD_SIZE).permuted(around_the_nodes),
    "one_peer_exponential": build("one_peer_exponential", WORLD_SIZE),
    "base": base,
    "base, ranks dealt out": base.permuted(around_the_nodes),
    "base x base": build("base", NUM_NODES).product(build("base", LOCAL_SIZE)),
    "local_global": build("local_global", WORLD_SIZE, local_size=LOCAL_SIZE),
    "complete": build("complete", WORLD_SIZE),
}
on_network = {}
print(f"{'messages on the network':<24}{'per round':>10}{'busiest node':>14}{'rounds to 1 %':>15}{'until then':>12}")
for label, topology in placed.items():
    found = analysis.traffic(topology, local_size=LOCAL_SIZE)
    num_rounds = analysis.rounds_to(topology, 0.01)
    per_round = [round_.sent_by_node.sum() for round_ in found.rounds]
    on_network[label] = sum(per_round[t % len(per_round)] for t in range(num_rounds))
    columns = f"{found.network_bytes:>10.4g}{found.max_node_bytes:>14.4g}{num_rounds:>15}{on_network[label]:>12.4g}"
    print(f"{label:<24}{columns}")
assert on_network["ring, ranks dealt out"] > on_network["ring"]
assert on_network["base, ranks dealt out"] < on_network["base"]
assert on_network["local_global"] < on_network["base, ranks dealt out"] < on_network["one_peer_exponential"]
assert np.isclose(on_network["base x base"], on_network["base"])
assert 2 * placed["base x base"].exact_after == base.exact_after
assert on_network["complete"] == min(on_network.values())

# %% [markdown]
# The same order of ranks is ruin for a ring and a gain for `base`: look at the placement before the graph. The product
# of two `base` sends as much over the network as one `base` of all, in half of the rounds; `local_global` needs less
# than either. And once more the least of all is the all-reduce: its ring crosses each border between two nodes once.
#
# ## 5. Time
#
# `recommend` turns this into seconds: every step costs a latency, and the bytes of the busiest node go through its one
# link; inside a node all is free. The arithmetic stands beside each prediction.

# %%
BANDWIDTH_GBPS = 25


def recommend(latency_us, message_mb, local_size=LOCAL_SIZE):
    """Rank all families on such a network."""
    return topologies.recommend(
        WORLD_SIZE,
        local_size=local_size,
        latency_us=latency_us,
        bandwidth_gbps=BANDWIDTH_GBPS,
        message_mb=message_mb,
    )


near = recommend(20, 100)
print_first(near, 9)
assert near.ranked[0].topology.name == "complete"

# %% [markdown]
# With a fast link of low latency the all-reduce agrees first. Now let the latency grow, with large messages and with
# small ones (a small or a compressed model):

# %%
winner = {}
for message_mb in (100, 1):
    for latency_us in (20, 100, 1000, 10_000, 100_000):
        found = recommend(latency_us, message_mb)
        first, complete = found.ranked[0], next(each for each in found.ranked if each.topology.name == "complete")
        winner[message_mb, latency_us] = first.topology.name
        print(
            f"{message_mb:>4} MB, {latency_us:>6} us: {first.topology.name:<13}{first.seconds * 1e3:>7.1f} ms to 1 %, "
            f"complete {complete.seconds * 1e3:>7.1f} ms"
        )
assert winner[100, 20] == winner[100, 1000] == winner[1, 20] == "complete"
assert winner[100, 10_000] == winner[1, 100] == "local_global"
assert winner[1, 10_000] == "simple_base"

# %% [markdown]
# The all-reduce takes 2 (n - 1) steps one after the other. It loses once these cost more than its bytes save: for large
# messages only at the latency of a wide-area network, for small ones much sooner. Then `local_global` and `simple_base`
# win, which exchange between nodes in few steps. (The model knows only the ring all-reduce; one over a tree takes fewer
# steps, and the border lies further out.)
#
# **What gossip buys** is seldom the fastest average. Training does not ask for agreement after every step: it is
# enough that a *round* hides beside the computation of one step, and that no one waits for all. So look at the longest
# round of a period:

# %%
one_peer_families = ("base", "one_peer_exponential", "one_peer_ring")
round_of = {}
for latency_us, message_mb, local_size in ((20, 100, 1), (20, 100, LOCAL_SIZE), (1000, 1, LOCAL_SIZE)):
    time_of = {each.topology: each for each in recommend(latency_us, message_mb, local_size).ranked}
    print(f"{message_mb} MB, {latency_us} us, ranks per node: {local_size}")
    for name in ("complete", *one_peer_families):
        each = time_of[build(name, WORLD_SIZE)]
        longest = each.longest_round_seconds
        print(f"  {name:<20} {longest * 1e3:>6.1f} ms a round, {each.seconds * 1e3:>7.1f} ms to 1 %")
        round_of[message_mb, local_size, name] = longest
for name in one_peer_families:
    assert round_of[100, 1, name] < 0.55 * round_of[100, 1, "complete"]
    assert round_of[1, LOCAL_SIZE, name] < 0.15 * round_of[1, LOCAL_SIZE, "complete"]
    assert round_of[100, LOCAL_SIZE, name] > round_of[100, LOCAL_SIZE, "complete"]
assert round_of[100, LOCAL_SIZE, "one_peer_ring"] < 1.05 * round_of[100, LOCAL_SIZE, "complete"]
ring_rounds = analysis.traffic(build("one_peer_ring", WORLD_SIZE), local_size=LOCAL_SIZE).rounds
assert [round_.busiest_node for round_ in ring_rounds] == [0, 2]  # all-reduce: 2 (n - 1) / n
for name in ("base", "one_peer_exponential"):
    assert analysis.traffic(build(name, WORLD_SIZE), local_size=LOCAL_SIZE).max_node_bytes == LOCAL_SIZE

# %% [markdown]
# - Where bytes decide and every rank has its own link, a one-peer round takes half as long as an all-reduce: one
#   message instead of 2 (n - 1) / n.
# - Where eight ranks share a link, `base` and `one_peer_exponential` send up to eight messages through it at once, and
#   their longest rounds are *longer* than an all-reduce. Those of the one-peer ring are about as long, but every other
#   one stays inside the nodes.
# - Where latency decides, a round is several times shorter: one step instead of 2 (n - 1).
#
# And who waits for whom?

# %%
print("workers that one late worker has held up, at most, after 1, 2, ... rounds:")
for name in ("complete", "exponential", *one_peer_families, "ring"):
    topology = build(name, WORLD_SIZE)
    held_up = [int((analysis.product(topology, k) != 0).sum(axis=0).max()) - 1 for k in range(1, 7)]
    print(f"{name:>20}: {held_up}")
    assert (held_up[0] == WORLD_SIZE - 1) == (name == "complete")
    assert (held_up[0] == 1) == (name in one_peer_families)

# %% [markdown]
# An all-reduce is a barrier: one late worker stops all others in the same round. With one peer per round it stops one,
# and the delay spreads only from round to round.
#
# ## 6. Local steps and a warm-up
#
# `every(k)` exchanges in every k-th round only; `then` runs one schedule first and another one afterwards (for instance
# an all-reduce while the models change fastest).

# %%
complete, one_peer = build("complete", WORLD_SIZE), build("one_peer_exponential", WORLD_SIZE)
warmed = complete.then(one_peer, after=100)
composed = topologies.compare([base, base.every(4), complete, complete.every(4), warmed], local_size=LOCAL_SIZE)
print(composed)
errors = analysis.consensus_errors(warmed, 3).round(3).tolist()
print(f"\nwith a warm-up of {warmed.warmup} rounds: left after 0 to 3 rounds {errors}")
figures = dict(zip(composed.topologies, composed.rows, strict=True))
for topology in (base, complete):
    once, rarely = figures[topology], figures[topology.every(4)]
    assert rarely.bytes == once.bytes
    assert rarely.rounds == 4 * once.rounds
    assert np.isclose(rarely.bytes_per_round, once.bytes_per_round / 4)
assert figures[warmed].rounds == analysis.rounds_to(one_peer, 0.01)
assert errors == [1.0, 0.0, 0.0, 0.0]

# %% [markdown]
# Local steps save bytes per *step*, not per agreement: a quarter of the traffic, four times as many rounds. That they
# pay is a statement about training, not about averaging: meanwhile the models drift apart, and how far is not in these
# numbers. The row of the schedule with a warm-up is about what follows the warm-up.
#
# ## 7. Rules of thumb
#
# For these 24 workers, from the predictions above:

# %%
far, small = recommend(10_000, 1), recommend(1000, 1)
thrifty = min((row for row in comparison.rows if row.max_sends == 1), key=lambda row: row.bytes)
for network, found in (("20 us, 100 MB", near), ("1 ms, 1 MB", small), ("10 ms, 1 MB", far)):
    shortest = min(each.longest_round_seconds for each in found.ranked)
    names = {each.topology.name for each in found.ranked if np.isclose(each.longest_round_seconds, shortest)}
    print(f"{network:>14}: first to agree {found.ranked[0].topology.name}, shortest round {', '.join(sorted(names))}")
print(f"fewest bytes to 1 % among those with at most one message per round: {thrifty.topology}")
assert thrifty.topology == "base"

# %% [markdown]
# 1. **Large messages, low latency, even workers, and the average hides beside the computation: `complete`.** It agrees
#    first and with the fewest bytes (sections 2, 4, 5).
# 2. **It does not hide, or a worker is often late: one peer per round.** With a link for each rank `base`, exact for
#    every n; where ranks share a link first look whether its round is any shorter (sections 2, 5).
# 3. **High latency, the more so with small messages: `local_global` or `simple_base`**, with few steps between nodes
#    (section 5).
# 4. **Several ranks per node: look at the placement** before the graph (section 4).
# 5. **Still too much traffic: `every(k)`**, if the training bears it; `then` for another start (section 6).
# 6. **A ring agrees slowest**; `one_peer_ring` is for links through which nothing else fits (sections 2, 5).
# 7. Judge by the worst start, from the round at which you begin, and at your n (the traps of section 2).
