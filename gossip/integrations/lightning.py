"""Strategies of Lightning's Trainer and Fabric that train by gossip, for the package ``lightning``.

Importing this module registers both under the name "gossip". :mod:`gossip.integrations.pytorch_lightning` has the same
for the packages ``pytorch_lightning`` and ``lightning_fabric``, whose classes are others.
"""

from __future__ import annotations

import lightning.pytorch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from gossip.integrations.lightning_fabric_strategy import FabricStrategy
from gossip.integrations.lightning_fabric_strategy import replica as replica
from gossip.integrations.lightning_trainer import TrainerStrategy


class GossipStrategy(TrainerStrategy, DDPStrategy):
    """Train by gossip in Lightning's Trainer: ``Trainer(strategy="gossip")``, or with this object's options.

    The LightningModule, its loops and callbacks stay as they are. By default every backward pass makes its step (see
    :class:`gossip.GossipDataParallel`), and ``gradient_clip_val`` is applied there; with ``step_in_backward=False`` the
    Trainer's own ``optimizer.step()`` makes it.

    - Validation runs on the average of all replicas, and a checkpoint's ``state_dict`` holds that average.
    - Beside each checkpoint ``x.ckpt`` that can be resumed is a folder ``x.ckpt.gossip`` with every rank's replica,
      from which ``fit(ckpt_path="x.ckpt")`` goes on bit for bit.
    - ``fit()`` ends with the average in the module, the same on all ranks.

    Parameters
    ----------
    topology : str or Topology
        See :class:`gossip.GossipDataParallel`.
    evaluate_averaged : bool
        False: validation during ``fit()`` runs on each rank's own replica.
    accelerator, cluster_environment, checkpoint_io, precision_plugin, parallel_devices, process_group_backend
    start_method : str
        Those of DDPStrategy, which the Trainer sets if they are left out.
    **options
        Of :class:`gossip.GossipDataParallel`, but for module, optimizer and scaler, which come from the Trainer. A
        ``timeout`` is the process group's too.

    Raises
    ------
    TypeError
        An option is none of these.

    Notes
    -----
    ``fit()`` raises ValueError before it begins for what cannot work: ``sync_batchnorm``, checkpoints on exceptions,
    and, where steps are made in backward, clipping by value or in ``configure_gradient_clipping``.

    Examples
    --------
    >>> from lightning.pytorch import Trainer
    >>> from gossip.integrations.lightning import GossipStrategy
    >>> strategy = GossipStrategy("ring", algorithm="adapt_then_combine", compression="bf16")
    >>> trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy)  # doctest: +SKIP
    """

    library = lightning.pytorch


class GossipFabricStrategy(FabricStrategy, FabricDDPStrategy):
    """Train by gossip in Fabric: ``Fabric(strategy="gossip")``, or with this object's options.

    ``fabric.setup(module, optimizer, ...)`` wraps the module, ``fabric.backward`` makes the step, or, with
    ``step_in_backward=False``, ``optimizer.step()``. ``fabric.no_backward_sync`` accumulates gradients;
    ``fabric.clip_gradients`` needs ``step_in_backward=False`` (else give ``clip_grad_norm``). ``fabric.save`` writes
    the average of all replicas, and every rank's own beside it, which ``fabric.load`` restores. To average or evaluate
    call :func:`replica`.

    Parameters
    ----------
    topology : str or Topology
        See :class:`gossip.GossipDataParallel`.
    accelerator, cluster_environment, checkpoint_io, precision, parallel_devices, process_group_backend
    start_method : str
        Those of Fabric's DDPStrategy, which Fabric sets if they are left out.
    **options
        Of :class:`gossip.GossipDataParallel`, but for module, optimizer and scaler. A ``timeout`` is the process
        group's too.

    Raises
    ------
    TypeError
        An option is none of these.
    """


StrategyRegistry.register("gossip", GossipStrategy, description="Decentralized data parallelism by gossip")
STRATEGY_REGISTRY.register("gossip", GossipFabricStrategy, description="Decentralized data parallelism by gossip")
