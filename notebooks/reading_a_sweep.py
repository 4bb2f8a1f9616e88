# %% [markdown]
# # Reading a sweep
#
# `python scripts/sweep.py experiment=topology_comparison` trains the same model over nine topologies, on 16, 25 and 64
# workers of which each sees about two classes of the digits, three seeds each; with all-reduce and with no
# communication at all beside them. It leaves a folder with `report.html`, a page to look at, and with what the page is
# made of: `results.csv`, one line per setting, and `results.json`, with the curves. This notebook reads the latter, as
# it was measured for docs/sweeps.md; give it the folder of a sweep of your own.

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt

import gossip

REPOSITORY = Path(gossip.__file__).parents[1]
FOLDER = REPOSITORY / "docs" / "topology_comparison"  # or outputs/sweeps/NAME

sweep = json.loads((FOLDER / "results.json").read_text())
rows = sweep["rows"]
print(sweep["description"])
print(f"{len(rows)} settings, target: {sweep['metric']['name']} {sweep['metric']['target']:.0%}")
print("predicted for", sweep["cluster"]["description"])

# %% [markdown]
# ## 1. The table: first the failures, then the baselines
#
# A setting whose runs failed is a row with the reason; look there first. Then the two baselines: **all-reduce** is what
# the same number of steps can reach, **no communication** what the average of strangers is worth. Topologies lie
# between them.

# %%
WORLD_SIZE = 64


def value(row, name):
    """Mean over the seeds, or None."""
    return row["values"][name] and row["values"][name]["mean"]


def cell(number, form):
    """A number, or a dash where there is none."""
    return "-" if number is None else format(number, form)


assert not any(row["num_failed"] for row in rows)
chosen = [row for row in rows if row["world_size"] == WORLD_SIZE]
print(f"{'':22}{'average':>9}{'worst':>8}{'apart':>8}{'rounds':>8}{'MiB':>7}{'ms':>6}   to the target")
for row in sorted(chosen, key=lambda row: value(row, "predicted_time_to_target_s") or 1e9):
    sent, time_s = value(row, "bytes_to_target"), value(row, "predicted_time_to_target_s")
    print(
        f"{row['label'][:21]:22}{value(row, 'averaged_accuracy'):9.1%}{value(row, 'local_accuracy_worst'):8.1%}"
        f"{value(row, 'consensus_distance_relative'):8.3f}{cell(value(row, 'rounds_to_target'), '8.0f'):>8}"
        f"{cell(sent and sent / 2**20, '7.2f'):>7}{cell(time_s and 1e3 * time_s, '6.0f'):>6}"
    )

# %% [markdown]
# ## 2. Steps are not bytes, and bytes are not time
#
# Step for step all-reduce is the best there is: it needs the fewest rounds. A round of it costs more, though, in bytes
# and, with 64 workers and links of 1 Gbit/s, in the latency of its 126 steps. So the order is another one on each axis:

# %%
by_label = {row["label"].partition("(")[0]: row for row in chosen}
figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained", sharey=True)
for label in ("ring", "exponential", "one_peer_exponential", "base", "all-reduce"):
    curves = by_label[label]["curves"]
    style = {"color": "black"} if label == "all-reduce" else {}
    for each, name, unit in zip(axes, ("step", "bytes", "time_s"), (1, 2**20, 1e-3), strict=True):
        pairs = zip(curves[name], curves["metric"], strict=True)  # None where only something else was measured
        points = [(place / unit, measured) for place, measured in pairs if measured is not None]
        each.semilogx(*zip(*points, strict=True), label=label, **style)
for each, name in zip(axes, ("steps", "MiB sent per worker", "predicted ms"), strict=True):
    each.set(xlabel=name, ylim=(0.7, 1.0))
axes[0].set_ylabel("accuracy of the average")
axes[-1].legend(fontsize=8)
plt.show()

# %%
first, ring = by_label["all-reduce"], by_label["ring"]
for label in ("one_peer_exponential", "base"):
    row = by_label[label]
    assert value(first, "rounds_to_target") < value(row, "rounds_to_target") < value(ring, "rounds_to_target")
    assert value(row, "predicted_time_to_target_s") < value(first, "predicted_time_to_target_s") / 2
    assert value(row, "bytes_to_target") < value(ring, "bytes_to_target") / 4

# %% [markdown]
# ## 3. Consensus explains the order
#
# Replicas that are far apart train on points that their average never visits. Topologies whose rounds multiply to the
# exact mean (`base`, `one_peer_exponential` for powers of two) stay closer together than a ring for half of its bytes,
# as the theory says; a star has one busy hub and neither agrees nor learns. What a **worst replica** is worth says
# whether you may use a replica as it is, or need the average.

# %%
for label in ("ring", "torus", "exponential", "one_peer_exponential", "base", "complete"):
    row = by_label[label]
    apart, worst = value(row, "consensus_distance_relative"), value(row, "local_accuracy_worst")
    print(f"{label:22} {apart:.3f} apart for {value(row, 'bytes_per_step') / 1024:5.1f} KiB a step, worst {worst:.0%}")
assert value(by_label["base"], "consensus_distance_relative") < value(ring, "consensus_distance_relative")
assert value(by_label["base"], "bytes_per_step") < value(ring, "bytes_per_step")

# %% [markdown]
# ## 4. Run one of the rows again
#
# Every row has its commands, one for each seed. What times are predicted for is `cluster` in the configuration:
# `cluster.bandwidth_gbps=25 cluster.latency_us=10 cluster.local_size=8`.

# %%
print(by_label["base"]["commands"][0])
