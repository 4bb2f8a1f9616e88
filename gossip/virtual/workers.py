"""Many replicas trained in one process, as a cluster with one rank per replica would train them."""

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self

import torch
from loguru import logger
from torch import nn
from torch.optim import Optimizer

from gossip.algorithms import Algorithm, resolve_algorithm
from gossip.compression.codec import Compression
from gossip.compression.compression_names import resolve_compression
from gossip.errors import GossipError
from gossip.exchange.recording import Recording
from gossip.measuring.step_stats import VirtualStats
from gossip.optimizers.bucket_optimizer import Closure, OptimizerArgument, replace_step
from gossip.parameters.buckets import check_unfrozen, make_buckets
from gossip.parameters.buffers import make_buffer_buckets
from gossip.parameters.extra_state import snapshot_extra_states
from gossip.parameters.names import named_buffers, named_parameters
from gossip.private_torch import at_end_of_backward, is_in_backward, tree_leaves
from gossip.step.backward_pass import refuse_compiled_autograd
from gossip.step.building.wrapper_arguments import check_choice, check_update, prepare_algorithm, resolve_topology
from gossip.step.optimizer_step_calls import OptimizerStepCalls
from gossip.step.state.kept_objects import KeepsObjects, KeptObjects
from gossip.step.step_order import StepOrder
from gossip.virtual.replayed_exchanges import ReplayedExchanges, check_recording
from gossip.virtual.replays import Replay
from gossip.virtual.replica_calls import ReplicaCalls, count_samples, divide, gather, scatter
from gossip.virtual.shards import Shard, average_of, distance_from_mean, load_into, make_shards, rows_of, written
from gossip.virtual.stacked_exchanges import StackedExchanges, StackedMeter
from gossip.virtual.stacked_optimizers import build_stacked_optimizers
from gossip.virtual.stacked_updating import RowsByName, StackedModel, StackedUpdater, along_rows
from gossip.virtual.virtual_arguments import checked_samples, make_module, resolve_devices
from topologies import Topology
from topologies.validation import check_integer


class VirtualWorkers(KeepsObjects):
    r"""Train ``world_size`` replicas in one process and mix them after every step, as in a distributed run.

    All replicas' parameters are stacked in tensors [n, ...]: one vectorised forward pass, one backward pass, one
    optimizer, and one product W X per bucket. Topology, algorithm and compression are those of
    :class:`gossip.GossipDataParallel`, and so are the results, up to rounding: replica i here is rank i there.

    Parameters
    ----------
    module : Module or callable
        One replica, or a function without arguments that makes it. All replicas start from it. It becomes
        ``workers.module``.
    world_size : int
        The number of replicas, n.
    optimizer : callable, Optimizer, sequence of Optimizer, or None
        As for :class:`gossip.GossipDataParallel`, over ``module``'s parameters, which are then replaced by the stacked
        ones. It must update each parameter by itself (SGD, AdamW, Muon ...).
    topology, algorithm, compression
        As for :class:`gossip.GossipDataParallel`.
    clip_grad_norm : float, optional
        Each replica's gradients are scaled down to this Euclidean norm before the update.
    clip : str
        "global": the norm of all gradients of a replica; "bucket": the norm of those in each bucket.
    buffers : str
        "local": float buffers stay local to each replica; "average": they are mixed like parameters.
    bucket_cap_mb : float
        The size of a replica's bucket in MiB. To reproduce a distributed run, use its value where it matters
        (``clip="bucket"``, compression).
    dim : int
        The dimension along which a batch is split over the replicas.
    loss_reduction : str
        "mean": the loss on which ``backward()`` is called is a mean over the samples of the whole batch; each replica
        then gets the gradient of the mean over its own samples. "sum": it is a sum over samples, or over the replicas'
        own losses; gradients are used unchanged.
    devices : sequence of torch.device or str, optional
        The devices over which the replicas are distributed evenly, in order. By default the first GPU if there is one,
        otherwise the CPU.
    replay : Recording, optional
        A run of so many ranks, joining ones included, that was recorded (``GossipDataParallel(record=...)``), is
        repeated, with the other arguments of that run.

    Raises
    ------
    ValueError, TypeError
        An argument, or a parameter of the module, cannot be used; the text says why.

    Attributes
    ----------
    module : Module
        A bare model. It holds the initial values, and after :meth:`averaged` and :meth:`global_avg` the mean.
    optimizer : Optimizer, tuple of Optimizer, or None
        The optimizer over the stacked parameters, for schedulers.
    algorithm, compression, topology, world_size
        Those in use.
    step : int
        The number of steps made, which is also the index of the next round. With a recording of ranks that step
        independently (:class:`gossip.Asynchronous`) each replica has its own number, see :attr:`next_steps`.
    is_vectorised : bool
        Whether the replicas run at once. A module that ``torch.func.vmap`` does not support is run replica by replica,
        and a warning says so. Each replica then uses a copy of ``module``: what its forward passes keep in attributes
        is its own, and attributes set later on ``module`` have no effect, except ``training``.

    Notes
    -----
    The step is made at the end of the outermost ``backward()`` outside :meth:`no_sync`. A replica that has had no
    sample since the last step, or whose gradients are not finite, is not updated, but still mixed. All replicas share
    the counters of an optimizer (Adam's ``step``). Gradients of stacked parameters are scaled to each replica's own
    mean when the step is made; those of inputs are the loss's.

    There is no ``max_difference``: no virtual worker can be wrong by itself, on a device or with a loop of its own, and
    one product W X mixes all replicas, without the difference along any single edge.

    :func:`gossip.save`, :func:`gossip.load` and :func:`gossip.export` accept virtual workers too; a run that started
    with them can continue in processes, and vice versa.

    Memory besides activations: parameters, gradients, the optimizer's state, and one message, each n times the model.
    Fused optimizer kernels, which do not support the gaps between stacked parameters, are replaced, with a warning.

    Examples
    --------
    >>> from functools import partial
    >>> workers = VirtualWorkers(nn.Linear(3, 1), 8, partial(torch.optim.SGD, lr=0.1), topology="ring", devices=["cpu"])
    >>> inputs, targets = torch.ones(32, 3), torch.ones(32, 1)
    >>> nn.functional.mse_loss(workers(inputs), targets).backward()
    >>> workers.step
    1
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        module: nn.Module | Callable[[], nn.Module],
        world_size: int,
        optimizer: OptimizerArgument,
        topology: str | Topology = "one_peer_exponential",
        *,
        algorithm: str | Algorithm = "adapt_while_communicating",
        compression: str | Compression | None = None,
        clip_grad_norm: float | None = None,
        clip: Literal["global", "bucket"] = "global",
        buffers: Literal["local", "average"] = "local",
        bucket_cap_mb: float = 25.0,
        dim: int = 0,
        loss_reduction: Literal["mean", "sum"] = "mean",
        devices: Sequence[torch.device | str] | None = None,
        replay: Recording | None = None,
    ) -> None:
        check_integer("world_size", world_size, minimum=1)
        check_integer("dim", dim, minimum=0)
        check_choice("loss_reduction", loss_reduction, ("mean", "sum"))
        check_update(clip, clip_grad_norm, buffers, bucket_cap_mb)
        module = make_module(module)
        resolved = resolve_algorithm(algorithm)
        has_changes = replay is not None and not resolved.is_asynchronous
        num_ranks = world_size if replay is None else check_recording(replay, world_size, has_changes=has_changes)
        self.topology = resolve_topology(topology, num_ranks)
        self.compression = resolve_compression(compression)
        chosen = resolve_devices(devices, world_size)
        module.to(chosen[0])
        self.world_size, self.step = world_size, 0
        self._dim, self._reduces_by_mean = dim, loss_reduction == "mean"
        self._cap_bytes = int(bucket_cap_mb * 2**20)
        named = list(named_parameters(module))
        buckets = make_buckets([entry for entry in named if entry[1].requires_grad], self._cap_bytes)
        buffer_buckets = make_buffer_buckets(module, len(buckets)) if buffers == "average" else ()
        self._frozen = {name: parameter for name, parameter in named if not parameter.requires_grad}
        self._released: list[list[str]] = []  # the names of what was unfrozen, grouped by step
        self._shards = make_shards(module, world_size, chosen)
        stacks = {id(parameter): [shard.parameters[name] for shard in self._shards] for name, parameter in named}
        self._optimizers = build_stacked_optimizers(optimizer, module, stacks)
        self.optimizer: Any = self._optimizers if len(self._optimizers) > 1 else next(iter(self._optimizers), None)
        bound = partial(
            prepare_algorithm,
            resolved,
            compression=self.compression,
            optimizers=self._optimizers,
            averages_buffers=buffers == "average",
        )
        self.algorithm = bound(self.topology)
        model = StackedModel(self._shards, buckets, buffer_buckets, self._optimizers)
        self._updater = StackedUpdater(model, stacks, clip_grad_norm=clip_grad_norm, clip=clip)
        self._calls = ReplicaCalls(module, self._updater.note_reached)
        self._replay: Replay | None = None
        if replay is not None and has_changes:
            exchanges: StackedExchanges = ReplayedExchanges(replay, self.topology, bound, model, self.compression)
        else:
            schedule = self.algorithm.schedule(self.topology)
            exchanges = StackedExchanges(model, schedule, self.algorithm, self.compression)
            self._replay = None if replay is None else Replay(replay, model, exchanges)
        self._exchanges = exchanges
        self._order = StepOrder(self._exchanges)
        self._kept = KeptObjects()
        self._synchronise = True
        self._is_averaged = self._callback_is_queued = self._has_gradients = False
        self._newest: VirtualStats | None = None
        otherwise = "train in processes, by GossipDataParallel(step_in_backward=False)"
        self._optimizer_step_calls = OptimizerStepCalls("", otherwise)
        for each in self._optimizers:
            replace_step(each, self._note_step, by_bucket=False)
        self.module = module  # set last: from here on only existing attributes can be set

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if "module" in own and name not in own and not name.startswith("_") and not hasattr(type(self), name):
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}; if it is the module's, set it there "
                f"(workers.module.{name} = ...) before the first call"
            )
        super().__setattr__(name, value)

    # ------------------------------------------------------------------ identity

    @property
    def is_vectorised(self) -> bool:
        """Whether the replicas run at once, or one after the other."""
        return self._calls.is_vectorised

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the stacked parameters, ``[n, *shape]``; with several devices, one stack ``[k, *shape]`` for each."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield :meth:`parameters` with the bare module's names; with several devices, a name occurs once for each."""
        return ((name, shard.parameters[name]) for name in self._shards[0].parameters for shard in self._shards)

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the stacked buffers, as :meth:`named_parameters` does the parameters."""
        return ((name, shard.buffers[name]) for name in self._shards[0].buffers for shard in self._shards)

    def replica(self, rank: int) -> nn.Module:
        """Return a copy of the bare module with the values of one rank's replica."""
        check_integer("rank", rank, minimum=0, maximum=self.world_size - 1)
        ((shard, rows),) = rows_of(self._shards, rank, rank + 1)
        copied = copy.deepcopy(self.module)
        load_into(copied, (shard,), lambda _, stacks: stacks[0][rows.start])
        self._calls.copy_extra_states(rank, copied)
        return copied

    def stats(self) -> VirtualStats | None:
        """Return what the newest step did; None before the first."""
        return self._newest

    def train(self, mode: bool = True) -> Self:
        """Put the replicas in training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Put the replicas in evaluation mode."""
        return self.train(False)

    # ------------------------------------------------------------------ training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Split a batch over the replicas, and join their outputs in order.

        All tensors within the arguments that have the dimension ``dim`` are split along it equally, with one extra
        sample for each of the first replicas if needed; with fewer samples than replicas the last ones get none.
        Everything else is passed to all replicas. Tensors in the output are joined along ``dim``, those without it to
        one entry per replica that had samples. Within :meth:`averaged` the averaged model gets the whole batch.

        Raises
        ------
        ValueError
            There is no batch to split.
        """
        if self._is_averaged:
            return self.module(*args, **kwargs)
        refuse_compiled_autograd()
        if not is_in_backward():
            self._recover()
        # The whole model is checkpointed: the backward pass about to start is an inner one; this one is the outermost.
        else:
            self._on_backward()
        inputs = (args, kwargs)
        num_samples = count_samples(inputs, self._dim)
        outputs, device = [], None
        for part in divide(num_samples, self.world_size):
            for shard, rows in rows_of(self._shards, part.first, part.stop):
                ranks = shard.ranks[rows]
                own, is_split = scatter(inputs, part, ranks, self._dim, shard.device)
                scale = num_samples / part.num_each if self._reduces_by_mean else 1.0
                outputs.append(self._run(shard, rows, own, is_split, scale))
                device = device or shard.device
        assert device is not None
        return gather(outputs, self._dim, device)

    def every(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of each replica for the same inputs, with tensors [n, ...], without gradients.

        It serves to evaluate the local replicas.
        """
        outputs = []
        with torch.no_grad():
            for shard in self._shards:
                own, is_split = scatter((args, kwargs), None, shard.ranks, self._dim, shard.device)
                outputs.append(self._run(shard, slice(0, len(shard.ranks)), own, is_split))
        return gather(outputs, None, self._shards[0].device)

    def _run(self, shard: Shard, rows: slice, inputs: Any, is_split: list[bool], scale: float = 1.0) -> Any:
        ranks = shard.ranks[rows]
        whole = rows == slice(0, len(shard.ranks))
        parameters = {
            name: stack.view_as(stack) if whole else stack[rows]  # a view, whose hooks see no other call's gradients
            for name, stack in shard.parameters.items()
        }
        buffers = {name: stack[rows] for name, stack in shard.buffers.items()}
        if torch.is_grad_enabled():
            self._watch(parameters, ranks, scale)
        output = self._calls(ranks, parameters, buffers, inputs, is_split)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._on_backward)
        return output

    def _recover(self) -> None:
        """Handle a backward pass that an exception ended."""
        if self._callback_is_queued:
            self._callback_is_queued = self._has_gradients = False
            self._updater.drop_gradients()
            logger.warning("step {}: the backward pass was ended by an exception; its gradients are dropped", self.step)

    def _watch(self, rows: Mapping[str, torch.Tensor], ranks: range, scale: float) -> None:
        """Note which rows of parameters get gradients, and the factor that makes them those of each replica's own mean.

        They are scaled in place when the step is made: scaling them here would take memory for a copy of each.
        """
        noted: torch.Tensor | None = None
        ratios: torch.Tensor | None = None

        def on_gradient(name: str, gradient: torch.Tensor) -> torch.Tensor:
            nonlocal noted, ratios
            self._on_backward()
            self._has_gradients = self._has_gradients or self._synchronise
            if noted is not self._updater.scales:  # once in a step
                noted, ratios = self._updater.scales, self._updater.note_scale(ranks, scale)
            if self.is_vectorised:
                self._updater.note_all_reached(name, ranks)
            return gradient if ratios is None else gradient * along_rows(ratios, gradient)

        for name, stack in rows.items():
            if stack.requires_grad:
                stack.register_hook(partial(on_gradient, name))

    def _on_backward(self, _: torch.Tensor | None = None) -> None:
        if self._synchronise and not self._callback_is_queued:
            self._callback_is_queued = True
            at_end_of_backward(self._on_backward_ended)

    def _on_backward_ended(self) -> None:
        self._callback_is_queued = False
        found, self._has_gradients = self._has_gradients, False
        if not found or all(parameter.grad is None for parameter in self.parameters()):
            return  # only the inputs' gradients, or not a step of these replicas
        if self._is_averaged:
            self._updater.drop_gradients()
        self._make_step()
        self._optimizer_step_calls.count_step()

    def _note_step(self, optimizer: Optimizer, closure: Closure | None) -> None:
        self._optimizer_step_calls.note(optimizer, closure, self.step, self._updater.has_gradients)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes within the block only accumulate gradients; the first one outside makes one step."""
        outer, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = outer

    def _unfreeze(self, names: Collection[str]) -> None:
        """Exchange the stacks of those of these parameters that are frozen."""
        names = [name for name in self._frozen if name in names]
        if not names:
            return
        check_unfrozen({name: self._frozen[name] for name in names})
        self._released.append(names)
        parameters = [(name, self._frozen.pop(name)) for name in names]
        # Indices as on a rank, because noise depends on a bucket's index.
        buckets = make_buckets(parameters, self._cap_bytes, len(self._exchanges.buckets))
        self._updater.add(buckets)
        self._exchanges.add(buckets)

    def weigh(self, samples: Sequence[float]) -> None:
        """Say how many samples each update of each replica counts from now on.

        See :meth:`gossip.GossipDataParallel.weigh`, which says when, and raises the same.
        """
        self.algorithm.check_weighted()
        self._exchanges.weigh(checked_samples(samples, self.world_size))

    def idle_step(self) -> None:
        """Make a step in which no replica has anything to backpropagate: they are mixed, and exchange.

        Gradients that :meth:`no_sync` accumulated are applied.
        """
        self._recover()
        self._make_step()

    @torch.no_grad()
    def _make_step(self) -> None:
        if self._is_averaged:
            raise GossipError(
                f"step {self.step}: inside averaged() the replicas cannot be trained; leave the block first"
            )
        self._updater.stack_new_groups()
        trained = {name for shard in self._shards for name in self._frozen if shard.parameters[name].requires_grad}
        self._unfreeze(trained)
        meter = StackedMeter(torch.zeros(self.world_size, dtype=torch.int64))
        self._exchanges.begin_step(self.step, self._updater)
        skipped = self._update(meter) if self._replay is None else self._replay.make_steps(self._updater, self.step)
        refused = meter.num_refused > 0
        self._updater.count_bad_steps(skipped, refused, self.step)
        self._newest = VirtualStats(self.step, meter.bytes_sent, int(skipped.sum()), int(refused.sum()))
        self.step += 1
        if (topology := self._exchanges.end_step(self.step, self._updater, meter)) is not None:
            self.topology, self.algorithm = topology, self._exchanges.algorithm
            self._order = StepOrder(self._exchanges)

    def _update(self, meter: StackedMeter) -> torch.Tensor:
        """Combine, update and send; return the ranks whose gradients are not finite, [n]."""
        everything = range(len(self._exchanges.in_flight))

        def direct(left: RowsByName) -> None:
            def left_in(index: int) -> list[torch.Tensor]:
                by_shard = left[self._exchanges.names(index)[0]]
                return [rows.to(shard.device) for rows, shard in zip(by_shard, self._shards, strict=True)]

            self._order.direct(everything, self.step, left_in)

        self._order.begin(everything, self.step, meter)
        with self._exchanges.updating((self._updater.scales != 0).double()):
            self._exchanges.check_weighed()
            skipped = self._updater.apply(self.step, direct if self.algorithm.directs else None)
            self._order.end(everything, self.step, meter)
        if self.algorithm.before_forward:
            for index in everything:
                self._exchanges.combine_(index, meter)
        return skipped

    @property
    def next_steps(self) -> list[int | None]:
        """The step that each replica makes next; with a recording each has its own, and None while it makes none.

        Samples that a replica receives while it has no step to make do not count.
        """
        if self._replay is not None:
            return list(self._replay.next_steps)
        return [self.step if rank in self._exchanges.next_ranks else None for rank in range(self.world_size)]

    # ------------------------------------------------------------------ averaging

    @torch.no_grad()
    def consensus_distance(self) -> tuple[float, float]:
        """Return the root mean square distance of the replicas from their mean, and relative to the mean's norm."""
        return distance_from_mean(self._shards, self._exchanges.weights(), self._exchanges.averaged_ranks)

    @torch.no_grad()
    def global_avg(self) -> None:
        """Replace every replica by the mean, integer buffers and extra states by rank 0's; drop messages in flight."""
        self._exchanges.drop()
        self._load_mean()
        values = dict(named_parameters(self.module)) | dict(named_buffers(self.module))
        for name, stack in (*self.named_parameters(), *self.named_buffers()):
            stack.copy_(values[name].to(stack.device).expand_as(stack))
        self._calls.share_extra_states()
        written(self._shards)
        self._exchanges.averaged()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Hold the mean of the replicas in ``module`` within the block, and direct calls to it; training is unaffected.

        Yields the bare module, ``workers.module``.
        """
        put_back_extra_states = snapshot_extra_states(self.module)
        self._load_mean()
        outer, self._is_averaged = self._is_averaged, True
        try:
            yield self.module
        finally:
            self._is_averaged = outer
            put_back_extra_states()

    def _load_mean(self) -> None:
        weights = self._exchanges.weights()
        load_into(self.module, self._shards, lambda name, _: average_of(self._shards, name, weights))
        self._calls.copy_extra_states(0, self.module)
