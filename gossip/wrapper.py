"""The wrapper that takes DistributedDataParallel's place."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from loguru import logger
from torch import nn
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

import topologies
from gossip.algorithms import AdaptWhileCommunicating
from gossip.averaging import average_module_, consensus_distance, saved_state
from gossip.bucket_optimizer import BucketOptimizer, OptimizerFactory, build_optimizer, make_step_passive
from gossip.buckets import Bucket, check_parameters, make_buckets
from gossip.errors import GossipError, ManifestError
from gossip.manifest import CONSTRUCTION, build_manifest, compare_manifests
from gossip.transports import DistributedTransport, Exchange, Transport
from gossip.world import World
from topologies import Round, Topology

DEFAULT_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class StepStats:
    """What one step cost on this rank.

    Attributes
    ----------
    step : int
        Counted from 0.
    exposed_wait_s : float
        Seconds for which the backward pass stood still, waiting for peers.
    bytes_sent : int
        What this rank sent for the round that it launched in this step.
    """

    step: int
    exposed_wait_s: float
    bytes_sent: int


@dataclass(frozen=True)
class _InFlight:
    """An exchange with the round that it belongs to: they travel together."""

    exchange: Exchange
    round: Round


class _StepProgress:
    """How far the step that is being made has come."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.awaited_gradients = [set(bucket.names) for bucket in buckets]
        self.num_launched = 0  # buckets launch in index order, the same on every rank
        self.ends_with_backward = False  # a callback at the end of the backward pass is queued
        self.exposed_wait_s = 0.0
        self.bytes_sent = 0


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
        Number of steps made; also the index of the next round.
    last_step : StepStats or None
        What the newest step cost.

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
    Collective: every rank of the default process group must construct it. Without a process group it is a world of one.

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
    ) -> None:
        super().__init__()
        self._world = World(timeout)
        try:
            self.topology = _resolve_topology(topology, self._world.world_size)
            cap_bytes = _bucket_cap_bytes(bucket_cap_mb)
            check_parameters(list(module.named_parameters()))
            self.optimizer = build_optimizer(optimizer, module)
            manifest = build_manifest(module, self.topology, self.optimizer, cap_bytes)
        except Exception as error:
            # The other ranks are about to compare manifests: tell them, rather than let them wait.
            with contextlib.suppress(ManifestError):
                compare_manifests(self._world, {CONSTRUCTION: f"refused ({error})"})
            raise
        compare_manifests(self._world, manifest)

        self.module = module
        self._buckets = make_buckets(module.named_parameters(), cap_bytes)
        for bucket in self._buckets:
            self._world.broadcast_(bucket.block, "broadcasting parameters from rank 0")
        for name, buffer in module.named_buffers():
            self._world.broadcast_(buffer, f"broadcasting buffer {name!r} from rank 0")

        self._algorithm = AdaptWhileCommunicating()
        self._transport = transport
        if transport is None and self.world_size > 1:
            self._transport = DistributedTransport(self._world, self.topology)
        self._bucket_optimizers: tuple[BucketOptimizer, ...] = ()
        if self.optimizer is not None:
            self._bucket_optimizers = tuple(
                BucketOptimizer(self.optimizer, bucket.parameters) for bucket in self._buckets
            )
            make_step_passive(self.optimizer)

        self.step = 0
        self.last_step: StepStats | None = None
        self._in_flight: list[_InFlight | None] = [None] * len(self._buckets)
        self._synchronise = True
        self._averaged = False
        self._error: BaseException | None = None
        self._progress = _StepProgress(self._buckets)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(bucket, name))
            for bucket in self._buckets
            if bucket.trainable
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True)
        ]
        if self.rank == 0:
            sizes = ", ".join(f"{bucket.block.nbytes / 2**20:.3g}" for bucket in self._buckets)
            logger.info(
                "gossip over {} ranks, topology {}, {} bucket(s) of {} MiB",
                self.world_size,
                self.topology.name,
                len(self._buckets),
                sizes,
            )

    @property
    def rank(self) -> int:
        """This process's place among the ranks."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world.world_size

    # ------------------------------------------------------------------ training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. Local."""
        self._check_alive()
        recomputing = torch._C._current_graph_task_id() != -1
        if self._progress.ends_with_backward and not recomputing:
            with self._fatal():
                raise GossipError(
                    f"rank {self.rank}: the backward pass of step {self.step} was ended by an exception; some buckets "
                    "were updated and sent and others not: this rank cannot go on, start again from a checkpoint"
                )
        if recomputing and self._synchronise:
            # Checkpointed as a whole: the backward pass about to be run here is an inner one.
            self._end_step_with_backward()
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                    leaf.register_hook(self._on_backward)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block, backward passes only accumulate gradients. Local; read when backward runs.

        The first backward outside makes one step from all of them.
        """
        outer, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = outer

    def idle_step(self) -> None:
        """Make the step of a rank that has nothing to backpropagate: no update, but the exchange. Local."""
        self._check_usable()
        self._end_step()

    def _on_backward(self, _: torch.Tensor) -> None:
        """The outermost backward has reached an output: before any inner (checkpointing) one begins."""
        if self._synchronise:
            self._end_step_with_backward()

    def _make_hook(self, bucket: Bucket, name: str) -> Any:
        def on_gradient(_: torch.Tensor) -> None:
            if not self._synchronise:
                return
            self._check_usable()
            with self._fatal():
                if self._progress.num_launched > bucket.index:
                    raise GossipError(
                        f"rank {self.rank}: step {self.step}, bucket {bucket.index}: parameter {name!r} got a gradient "
                        "after its bucket had been updated; put all but the last backward of a step under no_sync()"
                    )
                self._end_step_with_backward()
                awaited = self._progress.awaited_gradients
                awaited[bucket.index].discard(name)
                while self._progress.num_launched < len(self._buckets) and not awaited[self._progress.num_launched]:
                    self._launch_next()

        return on_gradient

    def _end_step_with_backward(self) -> None:
        if not self._progress.ends_with_backward:
            self._progress.ends_with_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_step)

    def _end_step(self) -> None:
        """Launch the buckets that wait for gradients which did not come; the step is made."""
        with self._fatal():
            while self._progress.num_launched < len(self._buckets):
                self._launch_next()
        self.last_step = StepStats(self.step, self._progress.exposed_wait_s, self._progress.bytes_sent)
        self.step += 1
        self._progress = _StepProgress(self._buckets)
        if self.optimizer is not None:
            self.optimizer.step()

    @torch.no_grad()
    def _launch_next(self) -> None:
        """Mix what has arrived for the next bucket, update it, send it."""
        bucket = self._buckets[self._progress.num_launched]
        self._progress.num_launched += 1
        in_flight, self._in_flight[bucket.index] = self._in_flight[bucket.index], None
        if in_flight is not None:
            mixed = self._await(in_flight)
            with record_function("gossip::mix"):
                self._algorithm.combine_(bucket.block, bucket.message, mixed)
        if self._bucket_optimizers:
            with record_function("gossip::update"):
                self._bucket_optimizers[bucket.index].step()
        bucket.written()
        round_ = self.topology.round(self.step)
        if self._transport is not None and round_.peers(self.rank):
            with record_function("gossip::send"):
                bucket.message.copy_(bucket.block)
                exchange = self._transport.start(bucket.message, round_, step=self.step, bucket=bucket.index)
            self._in_flight[bucket.index] = _InFlight(exchange, round_)
            self._progress.bytes_sent += exchange.bytes_sent

    def _await(self, in_flight: _InFlight) -> torch.Tensor:
        start = time.perf_counter()
        with record_function("gossip::wait"):
            mixed = in_flight.exchange.wait()
        self._progress.exposed_wait_s += time.perf_counter() - start
        return mixed

    # ------------------------------------------------------------------ averaging

    @torch.no_grad()
    def global_avg(self) -> None:
        """Replace every rank's parameters and float buffers by their mean; integer buffers by rank 0's. Collective.

        Waits for what is in flight and drops it: the replicas are equal. Training may go on, the rounds count on.
        """
        self._check_usable()
        with self._fatal():
            for index, in_flight in enumerate(self._in_flight):
                if in_flight is not None:
                    in_flight.exchange.wait()
                self._in_flight[index] = None
            average_module_(self.module, self._buckets, self._world)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the block the module holds the global average; afterwards all is as it was. Collective.

        Parameters and buffers are put back exactly, and what was in flight stays in flight: training goes on bit for
        bit as if nobody had looked. Holds one copy of parameters and buffers. No backward pass inside.
        """
        self._check_usable()
        with saved_state(self.module, self._buckets):
            with self._fatal():
                average_module_(self.module, self._buckets, self._world)
            self._averaged = True
            try:
                yield
            finally:
                self._averaged = False

    @torch.no_grad()
    def consensus_distance(self) -> tuple[float, float]:
        r"""How far the replicas are apart: :math:`\sqrt{\frac1n \sum_i \|x_i - \bar x\|^2}`. Collective.

        Returns
        -------
        distance, relative : float
            The distance, and the same divided by the norm of the mean; over parameters, not buffers.
        """
        self._check_usable()
        with self._fatal():
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

        What is in flight is awaited and dropped.
        """
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        if self._error is None:
            for in_flight in self._in_flight:
                if in_flight is not None:
                    in_flight.exchange.wait()
        self._in_flight = [None] * len(self._buckets)
        if self._transport is not None:
            self._transport.close()
        self._world.close()
        if self.optimizer is not None:
            self.optimizer.__dict__.pop("step", None)
        self._error = self._error or GossipError("this GossipDataParallel has been closed")

    def _check_alive(self) -> None:
        if self._error is not None:
            raise GossipError(f"rank {self.rank}: no training or averaging after: {self._error}") from self._error

    def _check_usable(self) -> None:
        self._check_alive()
        if self._averaged:
            raise GossipError(
                f"rank {self.rank}: step {self.step}: inside averaged() nothing can be trained or averaged; "
                "leave the block first"
            )

    @contextlib.contextmanager
    def _fatal(self) -> Iterator[None]:
        """An error inside the block ends this model's training: the ranks are no longer in step."""
        try:
            yield
        except BaseException as error:
            self._error = error
            raise


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


def _bucket_cap_bytes(bucket_cap_mb: float) -> int:
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb must be a positive number of MiB, got {bucket_cap_mb}")
    return int(bucket_cap_mb * 2**20)
