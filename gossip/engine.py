"""How a step is made: which bucket is mixed, updated and sent when."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from loguru import logger
from torch import nn
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from gossip.algorithms import AdaptWhileCommunicating
from gossip.bucket_optimizer import BucketOptimizer
from gossip.buckets import Bucket
from gossip.errors import GossipError
from gossip.transports import Exchange, Transport
from topologies import Round, Topology


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
        What this rank sends for the round that it launched in this step.
    """

    step: int
    exposed_wait_s: float
    bytes_sent: int


@dataclass(frozen=True)
class InFlight:
    """An exchange with the round that it belongs to: they travel together."""

    exchange: Exchange
    round: Round


class _StepProgress:
    """How far the step that is being made has come."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.awaited_gradients = [set(bucket.names) for bucket in buckets]
        self.num_launched = 0  # buckets launch in index order, the same on every rank
        self.callback_is_queued = False  # at the end of the backward pass
        self.has_gradients = False
        self.exposed_wait_s = 0.0
        self.bytes_sent = 0


class StepEngine:
    """Makes the steps of one model, from inside its backward passes.

    Parameters
    ----------
    buckets : sequence of Bucket
    optimizer : Optimizer or None
    topology : Topology
    transport : Transport or None
        None in a world of one.
    rank : int

    Attributes
    ----------
    step : int
        Number of steps made; also the index of the next round.
    last_step : StepStats or None
    in_flight : list of InFlight or None
        By bucket.
    synchronise : bool
        Whether a backward pass makes a step, or accumulates gradients only.
    is_averaged : bool
        Whether the buckets hold the global average for a while.
    error : BaseException or None
        What ended the training on this rank: the ranks are no longer in step.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        optimizer: Optimizer | None,
        topology: Topology,
        transport: Transport | None,
        rank: int,
    ) -> None:
        self.buckets = buckets
        self.optimizer = optimizer
        self.topology = topology
        self.transport = transport
        self.rank = rank
        self.step = 0
        self.last_step: StepStats | None = None
        self.in_flight: list[InFlight | None] = [None] * len(buckets)
        self.synchronise = True
        self.is_averaged = False
        self.error: BaseException | None = None
        self._algorithm = AdaptWhileCommunicating()
        self._bucket_optimizers = (
            [] if optimizer is None else [BucketOptimizer(optimizer, bucket.parameters) for bucket in buckets]
        )
        self._progress = _StepProgress(buckets)
        _open_engines.add(self)
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(bucket, name))
            for bucket in buckets
            if bucket.trainable
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True)
        ]

    # ------------------------------------------------------------------ around a forward pass

    def begin_forward(self) -> None:
        """Check that a step can be made; notice a forward pass that is a checkpoint's, inside a backward pass."""
        if torch._C._current_graph_task_id() == -1:
            self.check_alive()
        elif self.synchronise:
            # The whole model is checkpointed: the backward pass about to run is an inner one, this is the outermost.
            self._queue_callback()

    def end_forward(self, output: Any) -> None:
        """Watch for the backward pass from ``output``: it is seen here before any inner (checkpointing) one begins."""
        if torch.is_grad_enabled():
            for tensor in _tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._on_backward)

    def _on_backward(self, _: torch.Tensor) -> None:
        if self.synchronise and self.error is None:
            self._queue_callback()

    def _queue_callback(self) -> None:
        if not self._progress.callback_is_queued:
            self._progress.callback_is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_ended)

    # ------------------------------------------------------------------ inside a backward pass

    def _make_hook(self, bucket: Bucket, name: str) -> Callable[[torch.Tensor], None]:
        def on_gradient(parameter: torch.Tensor) -> None:
            if not self.synchronise:
                return
            if self.is_averaged:
                parameter.grad = None
            self.check_usable()
            with self.fatal():
                progress = self._progress
                if progress.num_launched > bucket.index:
                    raise GossipError(
                        f"rank {self.rank}: step {self.step}, bucket {bucket.index}: parameter {name!r} got a gradient "
                        "after its bucket had been updated. Of several backward passes in a step, put all but the last "
                        "under no_sync(); inside one, checkpoint with use_reentrant=False"
                    )
                self._queue_callback()
                progress.has_gradients = True
                progress.awaited_gradients[bucket.index].discard(name)
                while progress.num_launched < len(self.buckets):
                    if progress.awaited_gradients[progress.num_launched]:
                        break
                    self._launch_next()

        return on_gradient

    def _on_backward_ended(self) -> None:
        if self._progress.has_gradients:
            self.end_step()
        else:
            self._progress.callback_is_queued = False  # it was for the inputs' gradients only: no step

    def end_step(self) -> None:
        """Launch the buckets that wait for gradients which did not come; the step is made."""
        with self.fatal():
            while self._progress.num_launched < len(self.buckets):
                self._launch_next()
        self.last_step = StepStats(self.step, self._progress.exposed_wait_s, self._progress.bytes_sent)
        self.step += 1
        self._progress = _StepProgress(self.buckets)
        if self.optimizer is not None:
            self.optimizer.step()

    @torch.no_grad()
    def _launch_next(self) -> None:
        """Mix what has arrived for the next bucket, update it, send it."""
        bucket = self.buckets[self._progress.num_launched]
        self._progress.num_launched += 1
        bucket.check_parameters_live_here()
        in_flight, self.in_flight[bucket.index] = self.in_flight[bucket.index], None
        if in_flight is not None:
            mixed = self._await(in_flight)
            with record_function("gossip::mix"):
                self._algorithm.combine_(bucket.block, bucket.message, mixed)
        if self._bucket_optimizers:
            with record_function("gossip::update"):
                self._bucket_optimizers[bucket.index].step()
        bucket.written()
        round_ = self.topology.round(self.step)
        if self.transport is not None and round_.peers(self.rank):
            with record_function("gossip::send"):
                bucket.message.copy_(bucket.block)
                exchange = self.transport.start(bucket.message, round_, step=self.step, bucket=bucket.index)
            self.in_flight[bucket.index] = InFlight(exchange, round_)
            self._progress.bytes_sent += exchange.bytes_sent

    def _await(self, in_flight: InFlight) -> torch.Tensor:
        start = time.perf_counter()
        with record_function("gossip::wait"):
            mixed = in_flight.exchange.wait()
        self._progress.exposed_wait_s += time.perf_counter() - start
        return mixed

    # ------------------------------------------------------------------ between steps

    def drop_in_flight(self) -> None:
        """Wait for what is in flight and forget it."""
        with self.fatal():
            for index, in_flight in enumerate(self.in_flight):
                if in_flight is not None:
                    in_flight.exchange.wait()
                self.in_flight[index] = None

    def check_alive(self) -> None:
        """Raise if this rank cannot go on: after an error, or after a backward pass that died half-way."""
        if self.error is not None:
            raise GossipError(
                f"rank {self.rank}: no training or averaging after: {str(self.error) or repr(self.error)}"
            ) from self.error
        if self._progress.callback_is_queued and torch._C._current_graph_task_id() == -1:
            self._recover_from_dead_backward()

    def check_usable(self) -> None:
        """Raise if no step or average can be made now."""
        self.check_alive()
        if self.is_averaged:
            raise GossipError(
                f"rank {self.rank}: step {self.step}: inside averaged() nothing can be trained or averaged; "
                "leave the block first"
            )

    def _recover_from_dead_backward(self) -> None:
        if self._progress.num_launched:
            with self.fatal():
                raise GossipError(
                    f"rank {self.rank}: the backward pass of step {self.step} was ended by an exception; some buckets "
                    "were updated and sent and others not: this rank cannot go on, start again from a checkpoint"
                )
        if self._progress.has_gradients:
            for bucket in self.buckets:
                for parameter in bucket.parameters:
                    parameter.grad = None
            logger.warning(
                "rank {}: the backward pass of step {} was ended by an exception before anything was updated or sent; "
                "its gradients are dropped",
                self.rank,
                self.step,
            )
        self._progress = _StepProgress(self.buckets)

    @contextlib.contextmanager
    def fatal(self) -> Iterator[None]:
        """An error inside the block ends this model's training: the ranks are no longer in step."""
        try:
            yield
        except BaseException as error:
            self.error = error
            raise

    def close(self) -> None:
        """Remove the hooks; nothing can be trained any more. Local."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        _open_engines.discard(self)
        self.in_flight = [None] * len(self.buckets)
        self.error = self.error or GossipError("this GossipDataParallel has been closed")


_open_engines: weakref.WeakSet[StepEngine] = weakref.WeakSet()


def check_not_wrapped(module: nn.Module) -> None:
    """Refuse a module whose parameters some model trains already.

    Raises
    ------
    ValueError
        Names the parameter.
    """
    taken = {id(p) for engine in _open_engines for bucket in engine.buckets for p in bucket.parameters}
    for name, parameter in module.named_parameters():
        if id(parameter) in taken:
            raise ValueError(
                f"parameter {name!r} belongs to a GossipDataParallel already; wrap a module once, or close() the other"
            )


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers, dataclasses and objects that have some as attributes."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors_in([getattr(leaf, field.name) for field in fields(leaf)])
        elif hasattr(leaf, "__dict__"):
            yield from (value for value in vars(leaf).values() if isinstance(value, torch.Tensor))
