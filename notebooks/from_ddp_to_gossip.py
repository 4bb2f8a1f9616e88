# %% [markdown]
# # From DDP to gossip
#
# A training loop over `DistributedDataParallel`, and the same loop over `GossipDataParallel`: what changes, what stays,
# and what each of them sends. Both run here as four processes over gloo.
#
# ## 1. The loop that you have
#
# Workers import their function, so it stands in a file.

# %%
# %%writefile ddp_loop.py
import torch
import torch.distributed as dist
from loguru import logger
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

logger.disable("gossip")


def data(rank, world_size):
    """This rank's part of the digits, and the test images."""
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    return inputs[:1440][rank::world_size], targets[:1440][rank::world_size], inputs[1440:], targets[1440:]


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def batches(inputs, targets, num_epochs, rank):
    """Batches of 16 in a new order every epoch."""
    source = torch.Generator().manual_seed(rank)
    for _ in range(num_epochs):
        for chosen in torch.randperm(len(inputs), generator=source).split(16):
            if len(chosen) == 16:
                yield inputs[chosen], targets[chosen]


def train():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs, targets, test_inputs, test_targets = data(rank, world_size)
    model = DistributedDataParallel(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=220)
    for some_inputs, some_targets in batches(inputs, targets, 10, rank):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(some_inputs), some_targets).backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        return float((model(test_inputs).argmax(-1) == test_targets).float().mean())


# %% [markdown]
# ## 2. The loop over gossip
#
# The optimizer goes into the wrapper, because each bucket is updated, and its new values leave for a peer, inside
# `backward()`. So `zero_grad()` and `step()` go, and what looks at gradients after `backward()` becomes an argument:
# `clip_grad_norm=1.0`, `scaler=scaler`. At the end the replicas are averaged. (With `step_in_backward=False` the loop
# stays as it is.)

# %%
# %%writefile gossip_loop.py
from functools import partial

import torch
from ddp_loop import batches, data, make_net
from gossip import GossipDataParallel
from torch import nn


def train(**options):
    model = GossipDataParallel(make_net(), partial(torch.optim.SGD, lr=0.1, momentum=0.9), **options)
    inputs, targets, test_inputs, test_targets = data(model.rank, model.world_size)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(model.optimizer, T_max=220)
    bytes_sent = 0
    for some_inputs, some_targets in batches(inputs, targets, 10, model.rank):
        nn.functional.cross_entropy(model(some_inputs), some_targets).backward()
        scheduler.step()
        bytes_sent += model.stats().bytes_sent
    with torch.no_grad():
        local = float((model(test_inputs).argmax(-1) == test_targets).float().mean())
        with model.averaged():
            averaged = float((model(test_inputs).argmax(-1) == test_targets).float().mean())
    _, relative_distance = model.consensus_distance()
    steps, kib_per_step = model.step, bytes_sent / model.step / 1024
    model.close()
    return averaged, local, relative_distance, steps, kib_per_step


# %% [markdown]
# ## 3. Run both

# %%
from functools import partial

import ddp_loop
import gossip_loop

import gossip

PRELOAD = ("gossip", "sklearn.datasets")  # imported once, for all workers to come

ddp = gossip.launch(ddp_loop.train, world_size=4, preload=PRELOAD)
print(f"DDP: accuracy {ddp[0]:.1%}")

runs = {}
for topology, compression in [("one_peer_exponential", None), ("ring", None), ("one_peer_exponential", "int8")]:
    options = {"topology": topology, "compression": compression}
    runs[topology, compression] = gossip.launch(partial(gossip_loop.train, **options), world_size=4, preload=PRELOAD)

# %% [markdown]
# Every replica is a good model by itself, the average of them is what is kept. DDP sends $2 S (n - 1) / n$ bytes per
# step and rank, S being the size of the model (37.5 KiB here): 56.3 KiB. A peer at a time takes S, and 8 bits a third
# of it in this short run: a quarter, and what goes in full until it is known how far the replicas are apart.

# %%
print(f"{'topology':22}{'compression':12}{'average':>9}{'worst':>9}{'KiB a step':>12}")
for (topology, compression), ranks in runs.items():
    averaged, _, _, _, kib_per_step = ranks[0]
    worst = min(local for _, local, _, _, _ in ranks)
    print(f"{topology:22}{compression or 'none':12}{averaged:9.1%}{worst:9.1%}{kib_per_step:12.1f}")
    assert abs(averaged - ddp[0]) < 0.02  # as good as DDP, up to a few of the 357 test images

# %% [markdown]
# ## 4. What else changes
#
# | with DDP | with gossip |
# | --- | --- |
# | `clip_grad_norm_(model.parameters(), 1.0)` | `GossipDataParallel(..., clip_grad_norm=1.0)` |
# | `scaler.step(optimizer); scaler.update()` | `GossipDataParallel(..., scaler=scaler)` |
# | `with model.no_sync():` | the same |
# | `with model.join():` | the same |
# | `torch.save(model.module.state_dict())` on rank 0 | `gossip.save(model, folder)`, `gossip.export(model, path)` |
# | evaluate any rank's model | `with model.averaged(): evaluate(model)` |
# | unused parameters need a flag | they need none |
#
# Which topology to take on your network is the question of *choosing a topology*, and `python scripts/probe.py`
# measures whether gossip helps there at all.
