"""Strategies for gossip training in Lightning's Trainer and Fabric, for the package ``lightning``.

Importing this module registers both under the name "gossip". :mod:`gossip.integrations.pytorch_lightning` has the same
for the packages ``pytorch_lightning`` and ``lightning_fabric``, whose classes are distinct.
"""

import lightning.pytorch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from gossip.integrations.lightning_fabric_strategy import FabricStrategy
from gossip.integrations.lightning_fabric_strategy import replica as replica
from gossip.integrations.lightning_trainer import TrainerStrategy


class GossipStrategy(TrainerStrategy, DDPStrategy):
    """Gossip training in Lightning's Trainer: ``Trainer(strategy="gossip")``, or an instance with options.

    The LightningModule, its loops and callbacks stay unchanged. By default every backward pass makes its step (see
    :class:`gossip.GossipDataParallel`), and ``gradient_clip_val`` is applied there; with ``step_in_backward=False`` the
    Trainer's own ``optimizer.step()`` makes it.

    - Validation runs on the average of all replicas, and a checkpoint's ``state_dict`` holds that average.
    - Next to each checkpoint ``x.ckpt`` that can be resumed there is a folder ``x.ckpt.gossip`` with every rank's
      replica, from which ``fit(ckpt_path="x.ckpt")`` continues bit for bit.
    - ``fit()`` ends with the average in the module, equal on all ranks.

    Parameters
    ----------
    topology : str or Topology
        The topology, see :class:`gossip.GossipDataParallel`.
    evaluate_averaged : bool
        Whether validation during ``fit()`` runs on the average; if False, on each rank's own replica.
    **options
        Arguments of :class:`gossip.GossipDataParallel`, except module, optimizer and scaler, which come from the
        Trainer; a ``timeout`` also applies to the process group. And DDPStrategy's accelerator, cluster_environment,
        checkpoint_io, precision_plugin, parallel_devices, process_group_backend and start_method. An unknown one is a
        TypeError.

    Notes
    -----
    ``fit()`` raises ValueError before training starts for what cannot work: ``sync_batchnorm``, checkpoints on
    exceptions, and, where steps are made in backward, clipping by value or in ``configure_gradient_clipping``. The
    Trainer saves and restores its schedulers itself, and counts its steps from its own beginning: no rank can join or
    come back within it, so a process that joins and ``partition_timeout`` are refused. With ``on_peer_loss="continue"``
    it goes on without ranks that are lost, and writes a checkpoint when all are preempted.

    Examples
    --------
    >>> from lightning.pytorch import Trainer
    >>> from gossip.integrations.lightning import GossipStrategy
    >>> strategy = GossipStrategy("ring", algorithm="adapt_then_combine", compression="bf16")
    >>> trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy)  # doctest: +SKIP
    """

    library = lightning.pytorch


class GossipFabricStrategy(FabricStrategy, FabricDDPStrategy):
    """Gossip training in Fabric: ``Fabric(strategy="gossip")``, or an instance with options.

    ``fabric.setup(module, optimizer, ...)`` wraps the module, and ``fabric.backward`` makes the step or, with
    ``step_in_backward=False``, ``optimizer.step()`` does. ``fabric.no_backward_sync`` accumulates gradients;
    ``fabric.clip_gradients`` requires ``step_in_backward=False`` (otherwise pass ``clip_grad_norm``). ``fabric.save``
    writes the average of all replicas, and every rank's own next to it, which ``fabric.load`` restores. To average or
    evaluate, call :func:`gossip.integrations.lightning.replica`. With ``on_peer_loss="continue"`` ranks can be lost;
    they can join loops without collective calls of Fabric's: let ``replica(model).keep(scheduler=scheduler)`` keep the
    schedulers, on every rank.

    Parameters
    ----------
    topology : str or Topology
        The topology, see :class:`gossip.GossipDataParallel`.
    **options
        As for :class:`GossipStrategy`, with ``precision`` in place of ``precision_plugin``.
    """


StrategyRegistry.register("gossip", GossipStrategy, description="Decentralized data parallelism by gossip")
STRATEGY_REGISTRY.register("gossip", GossipFabricStrategy, description="Decentralized data parallelism by gossip")
