"""The wrapper that takes DistributedDataParallel's place."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch import nn
from torch.optim import Optimizer

import topologies
from gossip.averaging import average_module_, consensus_distance, saved_state
from gossip.bucket_optimizer import OptimizerFactory, build_optimizer, make_step_passive
from gossip.buckets import check_parameters, make_buckets
from gossip.debug_transport import DebugTransport, check_debug
from gossip.engine import StepEngine, StepStats, check_not_wrapped
from gossip.errors import GossipError
from gossip.manifest import CONSTRUCTION, build_manifest, compare_manifests
from gossip.transports import DistributedTransport, Transport
from gossip.world import World
from topologies import Topology

DEFAULT_TIMEOUT = timedelta(minutes=5)


class GossipDataParallel(nn.Module):
    r"""Train one replica per rank; mix it with a few peers' after every step, inside ``backward()``.

    Each bucket of parameters, as soon as its gradients are complete, waits for the messages of the previous step,
    mixes them in, applies the optimizer and sends its new values off, which then have a whole iteration to arrive:

    .. math:: x_i(t+1) = \sum_j W_{t-1}[i,j]\, x_j(t) + u_i(t)

    (:class:`gossip.AdaptWhileCommunicating`). There is no ``optimizer.step()`` to call, and gradients are gone after
    ``backward()``. A parameter without a gradient is not updated, but mixed all the same.

    Parameters
    ----------
    module : Module
        Its parameters become views of the buckets' flat blocks; rank 0's parameters and buffers go to all ranks.
    optimizer : callable or Optimizer, optional
        A factory that is called once with the list of ``(name, parameter)`` (``functools.partial(torch.optim.AdamW,
        lr=3e-4)``), or an optimizer built over the module's parameters. None leaves the parameters as they are but for
        mixing.
    topology : str or Topology
        A name of :func:`topologies.available`, or a topology of as many ranks as there are. Must be doubly stochastic.
    bucket_cap_mb : float
        Size of a bucket in MiB; a larger parameter has a bucket of its own.
    timeout : timedelta
        How long any wait for other ranks may take before it raises.
    transport : Transport, optional
        How messages travel; by default over ``torch.distributed``.
    process_group : ProcessGroup, optional
        The ranks that gossip with each other, of ``torch.distributed.new_group``; by default all. ``rank`` and the
        topology's ranks are those inside it. gloo gets communicators of our own; a group of another backend is used as
        it is, so that nothing else may use it meanwhile.
    debug : {None, "detail"}
        "detail" checks bucket, round, shape and digest of every message, and names the rank that is out of step: see
        :class:`gossip.DebugTransport`. Slow.

    Attributes
    ----------
    module : Module
        The module that was wrapped.
    optimizer : Optimizer or None
        The one optimizer: give it to schedulers, read and load its ``state_dict()``. Its ``step()`` has nothing left to
        do.
    topology : Topology
    rank, world_size : int
    step : int
    last_step : StepStats or None

    Raises
    ------
    ValueError, TypeError
        An argument, or a parameter of the module, cannot be used; the text says why.
    ManifestError
        The ranks do not train the same thing; raised on every rank.
    ExchangeError
        A rank did not take part in time.

    Notes
    -----
    Collective: every rank of the process group must construct it. Without a process group it is a world of one.

    Between steps ``module`` holds x(t); what is in flight is not applied to it.

    Examples
    --------
    >>> from functools import partial
    >>> model = GossipDataParallel(nn.Linear(3, 1), partial(torch.optim.SGD, lr=0.1), topology="ring")
    >>> model(torch.ones(2, 3)).sum().backward()
    >>> model.step
    1

    References
    ----------
    Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | OptimizerFactory | None = None,
        topology: str | Topology = "one_peer_exponential",
        *,
        bucket_cap_mb: float = 25.0,
        timeout: timedelta = DEFAULT_TIMEOUT,
        transport: Transport | None = None,
        process_group: dist.ProcessGroup | None = None,
        debug: str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        world = World(timeout, process_group)
        try:
            self._construct(module, optimizer, topology, bucket_cap_mb, transport, world, debug)
        except BaseException:
            world.close()
            raise

    def _construct(
        self,
        module: nn.Module,
        optimizer: Optimizer | OptimizerFactory | None,
        topology: str | Topology,
        bucket_cap_mb: float,
        transport: Transport | None,
        world: World,
        debug: str | None,
    ) -> None:
        try:
            topology = _resolve_topology(topology, world.world_size)
            cap_bytes = _bucket_cap_bytes(bucket_cap_mb)
            check_debug(debug, transport)
            check_parameters(module)
            check_not_wrapped(module)
            optimizer = build_optimizer(optimizer, module)
            manifest = build_manifest(module, topology, optimizer, cap_bytes) | {"debug": str(debug)}
        except Exception as error:
            # The other ranks are about to compare manifests: tell them, rather than let them wait.
            with contextlib.suppress(GossipError):
                compare_manifests(world, {CONSTRUCTION: f"refused ({error})"})
            raise
        compare_manifests(world, manifest)

        buckets = make_buckets(module.named_parameters(), cap_bytes)
        for bucket in buckets:
            world.broadcast_(bucket.block, "broadcasting parameters from rank 0")
        for name, buffer in module.named_buffers():
            world.broadcast_(buffer, f"broadcasting buffer {name!r} from rank 0")
        if transport is None and world.world_size > 1:
            transport = DistributedTransport(world, topology) if debug is None else DebugTransport(world)

        self.module = module
        self.optimizer = optimizer
        self.topology = topology
        self._world = world
        self._buckets = buckets
        self._engine = StepEngine(buckets, optimizer, topology, transport, world.rank)
        if optimizer is not None:
            make_step_passive(optimizer)
        # Parameters hold their hooks, the hooks the engine, and the engine the parameters: no garbage collector sees
        # through that. The hooks do not know the wrapper, so that its end can end them.
        self._finalizer = weakref.finalize(self, _give_back, self._engine, world, optimizer)
        self._finalizer.atexit = False
        if world.rank == 0:
            logger.info(
                "{} rank{}, topology {}, buckets of {}",
                world.world_size,
                "" if world.world_size == 1 else "s",
                topology.name,
                ", ".join(_size(bucket.block.nbytes) for bucket in buckets) or "nothing",
            )
            if isinstance(transport, DistributedTransport | DebugTransport):
                logger.info("{}", transport.describe())

    @property
    def rank(self) -> int:
        """This process's place among the ranks."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world.world_size

    @property
    def step(self) -> int:
        """Number of steps made; also the index of the next round."""
        return self._engine.step

    @property
    def last_step(self) -> StepStats | None:
        """What the newest step cost."""
        return self._engine.last_step

    # ------------------------------------------------------------------ training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. Local."""
        self._engine.begin_forward()
        output = self.module(*args, **kwargs)
        self._engine.end_forward(output)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block, backward passes only accumulate gradients. Local; read when backward runs.

        The first backward outside makes one step from all of them.
        """
        outer, self._engine.synchronise = self._engine.synchronise, False
        try:
            yield
        finally:
            self._engine.synchronise = outer

    @torch.inference_mode(False)
    def idle_step(self) -> None:
        """Make the step of a rank that has nothing to backpropagate. Local.

        It exchanges, and updates only what has gradients that ``no_sync`` accumulated.
        """
        self._engine.check_usable()
        self._engine.end_step()

    # ------------------------------------------------------------------ averaging

    @torch.inference_mode(False)
    def global_avg(self) -> None:
        """Replace every rank's parameters and float buffers by their mean; integer buffers by rank 0's. Collective.

        Waits for what is in flight and drops it: the replicas are equal. Training may go on, the rounds count on.
        """
        self._engine.check_usable()
        self._engine.drop_in_flight()
        with self._engine.fatal():
            average_module_(self.module, self._buckets, self._world)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the block the module holds the global average; afterwards all is as it was. Collective.

        Parameters and buffers are put back exactly, and what was in flight stays in flight: training goes on bit for
        bit as if nobody had looked. Holds one copy of parameters and buffers. No backward pass inside.
        """
        self._engine.check_usable()
        with saved_state(self.module, self._buckets):
            with self._engine.fatal():
                average_module_(self.module, self._buckets, self._world)
            self._engine.is_averaged = True
            try:
                yield
            finally:
                self._engine.is_averaged = False

    @torch.inference_mode(False)
    def consensus_distance(self) -> tuple[float, float]:
        r"""How far the replicas are apart: :math:`\sqrt{\frac1n \sum_i \|x_i - \bar x\|^2}`. Collective.

        Returns
        -------
        distance, relative : float
            The distance, and the same divided by the norm of the mean; over parameters, not buffers.
        """
        self._engine.check_usable()
        with self._engine.fatal():
            return consensus_distance(self._buckets, self._world)

    # ------------------------------------------------------------------ the module's own face

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's own, with its own keys. Local."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load into the module. Local: load the same on every rank."""
        if assign:
            raise ValueError(
                "assign=True would replace parameters that live in the buckets' blocks; load with assign=False, or "
                "before wrapping the module"
            )
        result = self.module.load_state_dict(state_dict, strict=strict)
        for bucket in self._buckets:
            bucket.written()
        return result

    def close(self) -> None:
        """Remove the hooks and end communication; the module trains plainly afterwards. Local.

        What is in flight is awaited and dropped. A model that is no longer referenced is closed without waiting.

        Raises
        ------
        ExchangeError
            What was in flight did not arrive; the model is closed all the same.
        """
        try:
            if self._engine.error is None:
                self._engine.drop_in_flight()
        finally:
            self._finalizer()


def _give_back(engine: StepEngine, world: World, optimizer: Optimizer | None) -> None:
    engine.close()
    world.close()
    if optimizer is not None:
        optimizer.__dict__.pop("step", None)


def _resolve_topology(topology: str | Topology, world_size: int) -> Topology:
    if isinstance(topology, str):
        topology = topologies.build(topology, world_size)
    if not isinstance(topology, Topology):
        raise TypeError(f"topology must be a name or a topologies.Topology, got {type(topology).__name__}")
    if topology.world_size != world_size:
        raise ValueError(
            f"topology {topology.name!r} is for {topology.world_size} ranks, but there are {world_size}; "
            f"build it with world_size={world_size}"
        )
    if topology.stochasticity != "doubly":
        raise ValueError(
            f"topology {topology.name!r} is only {topology.stochasticity}-stochastic: averages would be biased; choose "
            'doubly stochastic weights (weights="metropolis" for an undirected graph)'
        )
    return topology


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.3g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.3g} KiB"


def _bucket_cap_bytes(bucket_cap_mb: float) -> int:
    if not isinstance(bucket_cap_mb, int | float):
        raise TypeError(f"bucket_cap_mb must be a number of MiB, got {bucket_cap_mb!r}")
    if not (bucket_cap_mb > 0 and math.isfinite(bucket_cap_mb)):
        raise ValueError(f"bucket_cap_mb must be a positive number of MiB, got {bucket_cap_mb}")
    return int(bucket_cap_mb * 2**20)
