"""The wrapper that takes DistributedDataParallel's place."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh

from gossip.algorithms import Algorithm
from gossip.communication.transport import TransportFactory
from gossip.communication.world import World
from gossip.compression.codec import Compression
from gossip.errors import GossipError
from gossip.measuring.step_stats import StepStats
from gossip.optimizers.bucket_optimizer import OptimizerArgument
from gossip.parameters.buckets import Bucket
from gossip.parameters.module_face import ForwardOfModule, ModuleFace, forward_like
from gossip.parameters.other_wrappers import Outermost
from gossip.private_torch import fast_range
from gossip.step.construction import construct, give_back, make_world
from gossip.step.engine import StepEngine
from gossip.step.joint_work import JointWork
from gossip.step.wrapper_arguments import Arguments
from topologies import Topology

DEFAULT_TIMEOUT = timedelta(minutes=5)


class GossipDataParallel(ModuleFace, Outermost):
    r"""Train one replica per rank; mix it with a few peers' after every step, inside ``backward()``.

    Each bucket of parameters, as soon as its gradients are complete, waits for the messages of the previous step,
    mixes them in, applies the optimizer and sends its new values off, which then have a whole iteration to arrive:

    .. math:: x_i(t+1) = \sum_j W_{t-1}[i,j]\, x_j(t) + u_i(t)

    (:class:`gossip.AdaptWhileCommunicating`). There is no ``optimizer.step()`` to call, and gradients are gone after
    ``backward()``. A parameter without a gradient is not updated, but mixed all the same.

    Parameters
    ----------
    module : Module
        Its parameters become views of the buckets' flat blocks; rank 0's parameters and buffers go to all ranks. Those
        that require no gradient are equal from then on, and are not exchanged until they are unfrozen, which all ranks
        must do before the same step.
    optimizer : callable, Optimizer, sequence of Optimizer, or None
        A factory that is called once with the list of ``(name, parameter)`` (``functools.partial(torch.optim.AdamW,
        lr=3e-4)``), or one or several optimizers built over the module's parameters. None leaves the parameters as
        they are but for mixing.
    topology : str or Topology
        A name of :func:`topologies.available`, or a topology of as many ranks as there are. Doubly stochastic, unless
        the algorithm takes another.
    algorithm : str or Algorithm
        "adapt_while_communicating" (or "awc"), "adapt_then_combine" ("atc"), "integral_correction" and others, see
        ``gossip.ALGORITHMS``, or one of the classes with its constants.
    compression : str or Compression, optional
        What goes on the wire in place of the parameters' values: "bf16", "fp16", "int8", "int4", "choco" (sparse
        increments) and "powergossip" (low rank), both for static topologies, or an object with its constants.
    step_in_backward : bool
        False: ``model.optimizer.step()`` updates and exchanges, and the usual loop works unchanged, ``zero_grad()``,
        clipping, ``GradScaler`` and all. ``step(closure)`` evaluates the closure first, or, where the optimizer's
        ``step()`` requires one (LBFGS), leaves it to the optimizer, at the mixed parameters.
    clip_grad_norm : float, optional
        Gradients are scaled down to this Euclidean norm before the update; ``math.inf`` clips nothing.
    clip : str
        "global": the norm of all gradients of this rank; updates then wait for the end of the backward pass. "bucket":
        the norm of each bucket by itself, as soon as it is complete; it then depends on ``bucket_cap_mb``.
    scaler : torch.amp.GradScaler, optional
        The one that scales the loss. Updates wait for the end of the backward pass; a rank that overflows skips its
        update, but exchanges; the scale changes one step later, on all ranks alike. With ``step_in_backward`` there is
        no ``scaler.step()`` and no ``scaler.update()`` to call.
    buffers : str
        "local": float buffers (batch norm's statistics) stay each rank's own until ``averaged()`` or ``global_avg()``.
        "average": they are mixed with the peers' in every step, like parameters. Integer buffers are never mixed.
    bucket_cap_mb : float
        Size of a bucket in MiB; a larger parameter has a bucket of its own.
    timeout : timedelta
        How long any wait for other ranks may take before it raises; or a fifth more, see ``communication.sockets``.
    transport : str or callable
        How messages travel. "distributed": over ``torch.distributed``, :class:`gossip.DistributedTransport`. "debug":
        so too, and bucket, round, shape and digest of every message are checked, and the rank that is out of step is
        named, slowly: :class:`gossip.DebugTransport`. Or another name in ``gossip.TRANSPORTS``; or a function
        ``(world, topology) -> Transport``, such as a class that extends :class:`gossip.Transport`.
    process_group : ProcessGroup, optional
        The ranks that gossip with each other, of ``torch.distributed.new_group``; by default all. The topology's ranks
        are those inside it. A group of a backend other than gloo is used as it is: nothing else may use it meanwhile.
    on_peer_loss : str
        "raise": a rank that is lost ends the training of all. "continue": the others go on, and ``rank`` and
        ``world_size`` are those among the ranks that are left, see docs/when_ranks_die.md.
    min_ranks : int, optional
        With "continue": with fewer the training ends; by default more than half of the ranks.
    fallback_topology : str
        With "continue": the family for a number of ranks that ``topology`` cannot serve.
    soft_deadline : timedelta or float, optional
        With "continue": so long (a number is seconds) a step waits for a peer's message; what comes later is mixed in
        then. By default it waits for all of them.
    partition_timeout : timedelta or float, optional
        With "continue": so long a rank that was frozen or cut off tries to join those that went on without it. By
        default it raises at once.

    Attributes
    ----------
    module : Module
        The module that was wrapped. Its other attributes can be read and set through the model too. Parameters that
        are added to it later, frozen or not, are refused at the next forward pass.
    optimizer : Optimizer, tuple of Optimizer, or None
        As given, or made: hand it to schedulers, read and load its ``state_dict()``. With ``step_in_backward`` its
        ``step()`` has nothing left to do. Its step hooks are called once per step.
    algorithm : Algorithm
        With one that has it, ``algorithm.gamma`` is the mixing factor and may be set between steps, on all ranks alike.
    compression : Compression
    topology : Topology
    rank, world_size, step : int
    world : World
    grad_norm : float or None

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
    Collective: every rank of the process group must construct it. Without a process group it is a world of one. As a
    context manager it closes itself.

    Between steps ``module`` holds x(t); what is in flight is not applied to it. Edits between steps (in-place writes,
    ``load_state_dict``, ``p.data = ...``) are kept. A deep copy or an unpickled model is detached: it has the module,
    but no optimizer, hooks or communication. To other processes send clones: what they share sees no later step.

    An update whose gradients are not finite is skipped, and messages that are not finite are refused; both are counted
    in :meth:`stats` and, 16 steps in a row, an error. (On a GPU neither is checked: it would hold up the host.)

    An optimizer with a method ``pre_average_hook`` sees what was communicated, see :class:`gossip.UsesExchange`.

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

    @torch.inference_mode(False)
    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerArgument,
        topology: str | Topology = "one_peer_exponential",
        *,
        algorithm: str | Algorithm = "adapt_while_communicating",
        compression: str | Compression | None = None,
        step_in_backward: bool = True,
        clip_grad_norm: float | None = None,
        clip: Literal["global", "bucket"] = "global",
        scaler: GradScaler | None = None,
        buffers: Literal["local", "average"] = "local",
        bucket_cap_mb: float = 25.0,
        timeout: timedelta = DEFAULT_TIMEOUT,
        transport: str | TransportFactory = "distributed",
        process_group: dist.ProcessGroup | None = None,
        on_peer_loss: Literal["raise", "continue"] = "raise",
        min_ranks: int | None = None,
        fallback_topology: str = "base",
        soft_deadline: timedelta | float | None = None,
        partition_timeout: timedelta | float | None = None,
        mesh: DeviceMesh | None = None,
        shard: Literal["optimizer"] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        arguments = Arguments(
            optimizer=optimizer,
            topology=topology,
            algorithm=algorithm,
            compression=compression,
            step_in_backward=step_in_backward,
            clip_grad_norm=clip_grad_norm,
            clip=clip,
            scaler=scaler,
            buffers=buffers,
            bucket_cap_mb=bucket_cap_mb,
            transport=transport,
            on_peer_loss=on_peer_loss,
            min_ranks=min_ranks,
            fallback_topology=fallback_topology,
            soft_deadline=soft_deadline,
            partition_timeout=partition_timeout,
            mesh=mesh,
            shard=shard,
        )
        world = make_world(arguments, timeout, process_group)
        try:
            parts = construct(module, arguments, world)
        except BaseException:
            world.close()
            raise
        self.optimizer: Any = parts.optimizers if len(parts.optimizers) > 1 else next(iter(parts.optimizers), None)
        self.algorithm = parts.algorithm
        self.compression = parts.compression
        self.topology = parts.topology
        self._arguments = arguments
        self._world = world
        self._engine: StepEngine | None = parts.engine
        self._joint_work = JointWork(module, parts.engine, world)
        # Parameters hold their hooks, the hooks the engine, and the engine the parameters: no garbage collector sees
        # through that. The hooks do not know the wrapper, so that its end can end them.
        self._finalizer = weakref.finalize(self, give_back, parts.engine, world, parts.optimizers)
        self._finalizer.atexit = False
        self._forward = torch.compiler.disable(forward_like(GossipDataParallel.forward, module), recursive=False)
        if world.changes:
            from gossip.step.epoch_change import follow_epochs

            self._epochs = follow_epochs(self, parts, arguments, world)
            self._joint_work.catch_up = self._epochs.catch_up
        self.module = module  # last: from here on attributes are set in the module, if they are not ours

    # ------------------------------------------------------------------ what it is

    @property
    def rank(self) -> int:
        """This process's place among the ranks that train."""
        return self._world.rank if self._engine is not None else 0

    @property
    def world_size(self) -> int:
        """Number of ranks that train."""
        return self._world.world_size if self._engine is not None else 1

    @property
    def members(self) -> tuple[int, ...]:
        """Who trains, by their ranks at the beginning; their places here are the ranks of the topology."""
        return self._world.members if self._engine is not None else (0,)

    @property
    def world(self) -> World:
        """The ranks, for collectives of one's own between steps; given back by :meth:`close`."""
        self._live()
        return self._world

    @property
    def step(self) -> int:
        """Number of steps made; also the index of the next round."""
        return self._engine.step if self._engine is not None else self._detached_step

    @property
    def grad_norm(self) -> float | None:
        """Euclidean norm of this rank's gradients in the newest step, before clipping; None if it had none."""
        return self._live().gradient_norm()

    def stats(self) -> StepStats | None:
        """What the newest step cost on this rank; None before the first. Local."""
        return self._live().stats()

    # ------------------------------------------------------------------ training

    @ForwardOfModule
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, whose arguments it takes. Local."""
        engine = self._engine
        if engine is None:
            return self.module(*args, **kwargs)
        self.check_outermost(is_sharded_inside=engine.shards is not None)
        engine.begin_forward()
        call = engine.watched(self.module)
        with fast_range("gossip::forward"):
            output = call(*args, **kwargs)
        engine.end_forward(output)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block, backward passes only accumulate gradients. Local; read when backward runs.

        The first backward outside makes one step from all of them. With ``step_in_backward=False`` they always only
        accumulate.
        """
        engine = self._live()
        outer, engine.synchronise = engine.synchronise, False
        try:
            yield
        finally:
            engine.synchronise = outer

    @torch.inference_mode(False)
    def idle_step(self) -> None:
        """Make the step of a rank that has nothing to backpropagate. Local.

        It exchanges, and updates only what has gradients that ``no_sync`` accumulated; with ``step_in_backward=False``
        nothing at all.
        """
        engine = self._live()
        engine.check_usable()
        engine.check_places()
        engine.end_step()

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks make different numbers of steps within the block. Collective.

        A rank that leaves the block keeps exchanging, without updates of its own, for as long as any other rank makes
        steps. All ranks leave it after the same number of steps.

        Raises
        ------
        ExchangeError
            The others neither made a step nor left the block in time.
        """
        self._live()
        with self._joint_work.join():
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip all gradients of this rank, between ``backward()`` and ``optimizer.step()``. Local.

        Returns
        -------
        Tensor, []
            The norm before.

        Raises
        ------
        GossipError
            Steps are made in backward: the gradients are gone.
        """
        if self._live() and self._arguments.step_in_backward:
            raise GossipError(
                "clip_grad_norm_ finds no gradients: the updates have been made inside backward; pass "
                f"clip_grad_norm={max_norm:g} to GossipDataParallel, or step_in_backward=False to keep the usual loop"
            )
        return self._live().updater.clip_(max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. Local."""
        super().zero_grad(set_to_none)
        if self._engine is not None and self._engine.shards is not None:
            self._engine.shards.replica.zero_grad(set_to_none)

    # ------------------------------------------------------------------ averaging

    @torch.inference_mode(False)
    def global_avg(self) -> None:
        """Replace every rank's parameters and float buffers by their mean; integer buffers by rank 0's. Collective.

        Waits for what is in flight and drops it: the replicas are equal. Training may go on, the rounds count on.

        Raises
        ------
        ExchangeError
            A rank is gone or did not take part in time. Nothing is half summed: every value is the mean, or still this
            rank's own, and the text says which; up to 64 MiB of parameters and buffers change together or not at all.
        """
        self._live()
        self._joint_work.average()

    @contextlib.contextmanager
    def averaged(self, recalibrate: Iterable[Any] | None = None) -> Iterator[None]:
        """Within the block the module holds the global average; afterwards all is as it was. Collective.

        Parameters and buffers are put back exactly, and what was in flight stays in flight: training goes on bit for
        bit as if no average had been taken. Holds one copy of parameters and buffers. No backward pass inside.

        Parameters
        ----------
        recalibrate : iterable, optional
            Batches of inputs, tuples that begin with them, or mappings of the module's arguments: batch norm's running
            statistics are estimated anew for the averaged weights, from all ranks' batches, instead of being averaged.
            A rank may have none.

        Raises
        ------
        ValueError
            ``recalibrate`` is empty on all ranks.
        ExchangeError
            A rank is gone or did not take part in time; parameters and buffers are put back.
        """
        self._live()
        with self._joint_work.averaged(recalibrate):
            yield

    @torch.inference_mode(False)
    def consensus_distance(self) -> tuple[float, float]:
        r"""How far the replicas are apart: :math:`\sqrt{\frac1n \sum_i \|x_i - \bar x\|^2}`. Collective.

        Returns
        -------
        distance, relative : float
            The distance, and the same divided by the norm of the mean; over parameters, not buffers.
        """
        self._live()
        return self._joint_work.distance()

    # ------------------------------------------------------------------ values and copies

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's own, with its own names. Local.

        What the algorithm wants combined before they are read is awaited first; reading ``model.module`` directly
        between steps does not see it yet.
        """
        if self._engine is not None:
            self._engine.combine_if_due()
        return super().named_parameters(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load into the module. Local: load the same on every rank.

        Keys that all begin with ``module.``, as DistributedDataParallel writes them, are taken too. With ``assign``
        the values are copied all the same: the parameters go on living in the buckets.
        """
        if self._engine is not None and self._engine.error is None:
            self._engine.settle()  # what must be combined before the values are read must be before they are replaced
        result = super().load_state_dict(state_dict, strict, assign)
        if assign and self._engine is not None:
            self._engine.settle()
        return result

    def __getstate__(self) -> dict[str, Any]:
        if self._engine is not None and self._engine.error is None:
            self._engine.settle()
        return {"module": self.module, "topology": self.topology, "step": self.step}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self.topology = state["topology"]
        self.optimizer = None
        self._detached_step = state["step"]
        self._engine = None
        self._forward = forward_like(GossipDataParallel.forward, state["module"])
        self.module = state["module"]

    # ------------------------------------------------------------------ the end

    @torch.inference_mode(False)
    def leave(self) -> None:
        """Leave the other ranks, which go on without this one, and close; between two steps, with "continue". Local.

        Nothing is lost: this rank exchanges, without updates, up to the step from which on the others do without it.

        Raises
        ------
        GossipError
            Too few would be left, or ``on_peer_loss`` is "raise".
        """
        self._live().check_between_steps()
        if not self._world.changes:
            raise GossipError('leave() needs ranks that go on without this one: on_peer_loss="continue"')
        self._epochs.leave()
        self.close()

    def close(self) -> None:
        """Remove the hooks and end communication; the module trains plainly afterwards. Local.

        What is in flight is awaited and dropped (combined, if the algorithm wants it before the next forward pass). A
        model that is no longer referenced is closed without waiting.

        Raises
        ------
        ExchangeError
            What was in flight did not arrive; the model is closed all the same.
        """
        engine = self._engine
        if engine is None:
            return
        try:
            if engine.error is None and not engine.is_parents:
                engine.settle(closes=True)
                engine.drop_in_flight()
        finally:
            self._finalizer()

    def __enter__(self) -> GossipDataParallel:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._engine is not None:
            self._finalizer()

    @property
    def _buckets(self) -> list[Bucket]:
        """Of the parameters that are exchanged, in launch order."""
        self._live()
        return self._joint_work.buckets

    def _live(self) -> StepEngine:
        if self._engine is None:
            raise GossipError(
                "this GossipDataParallel is a detached copy: it has no optimizer and no peers; wrap its .module to "
                "train it"
            )
        return self._engine
