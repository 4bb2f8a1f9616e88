# %% [markdown]
# # Quickstart: sixteen workers in one process
#
# Decentralized training keeps one replica of a model per worker. After every step a worker averages its parameters with
# a few peers, and at the end one average over all gives the model that is used. `VirtualWorkers` does this for any
# number of workers in one process: what you see here is what as many processes compute, up to rounding.

# %%
from functools import partial

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from gossip import VirtualWorkers

torch.set_num_threads(1)  # faster for so small a model

# %% [markdown]
# ## 1. Data of which every worker sees a part
#
# 1,797 handwritten digits. Each of 16 workers gets the samples of about two classes only, so that it has to learn the
# others from its peers.

# %%
WORLD_SIZE = 16
BATCH_SIZE = 16  # per worker

images, labels = load_digits(return_X_y=True)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
inputs, targets = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
test_inputs, test_targets = inputs[1440:], targets[1440:]
by_class = targets[:1440].argsort(stable=True).view(2 * WORLD_SIZE, -1)
shards = torch.cat([by_class[:WORLD_SIZE], by_class[WORLD_SIZE:]], dim=1)  # [workers, samples of each]


def accuracy(logits):
    """Right answers on the test images; one number per leading dimension."""
    return (logits.argmax(-1) == test_targets).float().mean(-1)


# %% [markdown]
# ## 2. Train
#
# `workers(batch)` splits one batch over the replicas, and `backward()` makes the step of all of them: mix, update,
# send. There is no `optimizer.step()`.


# %%
def train(topology, num_steps=200):
    """Accuracy of every replica and of their average, and the distance between them, every 20 steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    workers = VirtualWorkers(model, WORLD_SIZE, optimizer, topology, devices=["cpu"])
    history = []
    for step in range(num_steps):
        chosen = torch.stack([shard[torch.randperm(len(shard))[:BATCH_SIZE]] for shard in shards]).flatten()
        nn.functional.cross_entropy(workers(inputs[chosen]), targets[chosen]).backward()
        if (step + 1) % 20 == 0:
            local = accuracy(workers.every(test_inputs))
            with workers.averaged() as averaged, torch.no_grad():
                together = accuracy(averaged(test_inputs))
            _, relative = workers.consensus_distance()
            history.append((step + 1, float(together), float(local.mean()), float(local.min()), relative))
    return history


histories = {name: train(name) for name in ("ring", "one_peer_exponential", "complete")}

# %% [markdown]
# ## 3. What came out
#
# Left: the average of the replicas (solid) against the worst single replica (dotted). Right: how far the replicas are
# from their mean. A ring passes news on slowly, so its replicas stay apart; one peer at a time, well chosen, keeps them
# closer for half of a ring's messages.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
for number, (name, history) in enumerate(histories.items()):
    steps, together, _, worst, distances = zip(*history, strict=True)
    left.plot(steps, together, color=f"C{number}", label=name)
    left.plot(steps, worst, ":", color=f"C{number}")
    right.semilogy(steps, distances, color=f"C{number}", label=name)
left.set(xlabel="steps", ylabel="test accuracy", ylim=(0, 1))
right.set(xlabel="steps", ylabel="relative consensus distance")
left.legend(title="topology", loc="lower right")
plt.show()

# %%
final = {name: history[-1] for name, history in histories.items()}
assert final["one_peer_exponential"][4] < final["ring"][4]  # closer together than on a ring
assert all(together > worst for _, together, _, worst, _ in final.values())  # the average is better than its parts
for name, (_, together, _, worst, _) in final.items():
    print(f"{name:22} average {together:.0%}, worst replica {worst:.0%}")

# %% [markdown]
# Next: training in processes, with the exchange beside the computation, is in *from DDP to gossip*; how to choose among
# the topologies is in *choosing a topology*; whole comparisons are one command, `python scripts/sweep.py`, whose page
# *reading a sweep* goes through.
