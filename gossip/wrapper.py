"""The wrapper that replaces DistributedDataParallel."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh

from gossip.algorithms import Algorithm
from gossip.communication.world import World
from gossip.compression.codec import Compression
from gossip.errors import GossipError, names_arguments
from gossip.exchange.transport import TransportFactory
from gossip.measuring.step_stats import MemoryUse, StepStats
from gossip.optimizers.bucket_optimizer import OptimizerArgument
from gossip.parameters.module_proxy import ForwardOfModule, ModuleProxy, Outermost, forward_like
from gossip.private_torch import fast_range
from gossip.step.building.construction import construct, give_back, make_worlds
from gossip.step.building.wrapper_arguments import OF_DDP, Arguments
from gossip.step.collective_operations import CollectiveOperations
from gossip.step.engine import StepEngine
from gossip.step.state.kept_objects import KeepsObjects, KeptObjects
from topologies import Topology

if TYPE_CHECKING:
    from gossip.step.generation_change import GenerationChange

DEFAULT_TIMEOUT = timedelta(minutes=5)


class GossipDataParallel(CollectiveOperations, KeepsObjects, ModuleProxy, Outermost):
    r"""Train one replica per rank; mix it with those of a few peers after every step, inside ``backward()``.

    Each bucket of parameters, as soon as its gradients are complete, waits for the messages of the previous step,
    mixes them in, applies the optimizer and sends its new values off, which then have a whole iteration to arrive:

    .. math:: x_i(t+1) = \sum_j W_{t-1}[i,j]\, x_j(t) + u_i(t)

    (:class:`gossip.AdaptWhileCommunicating`). There is no ``optimizer.step()`` to call, and the gradients have been
    released when ``backward()`` returns. A parameter without a gradient is not updated, but it is still mixed.

    Parameters
    ----------
    module : Module
        Its parameters become views of the buckets' flat blocks; rank 0's parameters and buffers are broadcast to all
        ranks. Parameters that require no gradient are equal from then on and are not exchanged until they are unfrozen,
        which all ranks must do before the same step.
    optimizer : callable, Optimizer, sequence of Optimizer, or None
        A factory that is called once with the list of ``(name, parameter)`` (``functools.partial(torch.optim.AdamW,
        lr=3e-4)``), or one or several optimizers built over the module's parameters. With None they are only mixed.
    topology : str or Topology
        A name from :func:`topologies.available`, or a topology whose size is the number of ranks. It must be doubly
        stochastic, unless the algorithm accepts another.
    algorithm : str or Algorithm
        The update rule: "adapt_while_communicating" (or "awc"), "adapt_then_combine" ("atc"), "integral_correction" or
        another name in ``gossip.ALGORITHMS``; or an instance of one of the classes, with constants of your choice.
    compression : str or Compression, optional
        What is sent in place of the parameters' values: "bf16", "fp16", "int8", "int4", "choco" (sparse increments) or
        "powergossip" (low rank), the last two for static topologies; or an instance, with constants of your choice.
    step_in_backward : bool
        If False, ``model.optimizer.step()`` updates and exchanges, and the usual loop works unchanged, including
        ``zero_grad()``, clipping and ``GradScaler``. ``step(closure)`` evaluates the closure first; where the
        optimizer's ``step()`` requires one (LBFGS), the optimizer evaluates it, at the mixed parameters.
    clip_grad_norm : float, optional
        Gradients are scaled down to this Euclidean norm before the update; ``math.inf`` clips nothing.
    clip : str
        "global": the norm of all gradients of this rank; updates then wait for the end of the backward pass. "bucket":
        the norm of each bucket by itself, as soon as it is complete; it then depends on ``bucket_cap_mb``.
    scaler : torch.amp.GradScaler, optional
        The scaler that scales the loss. Updates wait for the end of the backward pass. A rank that overflows skips its
        update but still exchanges, and the scale changes one step later, identically on all ranks. With
        ``step_in_backward`` neither ``scaler.step()`` nor ``scaler.update()`` is to be called.
    buffers : str
        "local": float buffers (batch norm's statistics) stay local to each rank until ``averaged()`` or
        ``global_avg()``. "average": they are mixed with the peers' in every step, like parameters. Integer buffers are
        never mixed.
    bucket_cap_mb : float
        The size of a bucket in MiB (with ``mesh``, of what a group has of it); a larger parameter has one to itself.
    timeout : timedelta
        How long any wait for other ranks can last before it raises; some waits last up to a fifth longer, see
        ``gossip.communication.host.tcp_options``.
    transport : str or callable
        How messages travel: "distributed", over ``torch.distributed`` (:class:`gossip.DistributedTransport`); "debug",
        with a check of every message, which names a rank that is out of step and is slow
        (:class:`gossip.DebugTransport`); another name in ``gossip.TRANSPORTS``; or a function ``(world, topology) ->
        Transport``, such as a class that extends :class:`gossip.Transport`.
    process_group : ProcessGroup, optional
        The ranks that gossip with each other, from ``torch.distributed.new_group``; all ranks by default. The
        topology's ranks are the ranks within this group. A group of a backend other than gloo is used directly: nothing
        else may use it during training.
    on_peer_loss : str
        "raise": the loss of a rank ends the training of all. "continue": the others continue, and ``rank`` and
        ``world_size`` refer to the remaining ranks, or with ``mesh`` groups, see docs/when_ranks_die.md.
    min_ranks : int, optional
        With "continue": training ends when fewer ranks (with ``mesh``, groups) than this remain. The default is a
        majority of them.
    fallback_topology : str
        With "continue": the topology family used for a number of ranks that ``topology`` cannot serve.
    soft_deadline : timedelta or float or "auto", optional
        With "continue": how long a step waits for a peer's message (a number is in seconds); a message that arrives
        later is mixed in when it arrives. "auto": as long as the messages of this peer usually take. By default a step
        waits for all of them.
    partition_timeout : timedelta or float, optional
        With "continue": how long a rank that was frozen or cut off tries to rejoin the ranks that continued without it
        (a number is in seconds). By default it raises at once.
    on_preemption : callable, optional
        With "continue": called with the model on every remaining rank, after the same step, once so many ranks have
        received SIGTERM within 5 s that fewer than ``min_ranks`` would remain; save there. The process then ends with
        status 143. A rank that receives SIGTERM by itself leaves.
    authenticate : bool
        With "continue": whether messages to other machines carry authentication codes, see docs/several_nodes.md.
    record : path, optional
        With "continue": a folder in which each rank notes who trains when, and which messages were lost or late, so
        that virtual workers can repeat the run (:meth:`gossip.Recording.load`).
    mesh : DeviceMesh, optional
        A mesh of the dimensions "gossip" and "shard" (:func:`gossip.make_shard_mesh`). The ranks along "shard",
        a group, train one replica together, and each group is one rank of the topology. By default the module is one
        that ``fully_shard`` has sharded over ``mesh["shard"]``; the optimizer must be a factory, and is built over this
        rank's shards. See docs/larger_models.md.
    shard : str, optional
        With ``mesh``, for a module that is not sharded. "optimizer": each rank of a group has whole parameters from the
        forward pass to the end of the backward pass, and otherwise its share of them, of the gradients and of the
        optimizer's state: rows, or whole parameters if the optimizer needs these as Muon does, which is tried out with
        one that the factory makes for this alone. "none": each has all of them; gradients are averaged over the group,
        and each rank exchanges its part of every bucket.
    max_difference : str or float, optional
        "warn": a rank whose values are finite but far beyond what is usual, or stuck, is named in a warning and counted
        in :meth:`stats`. "clip", or a multiple of what is usual: what arrives beyond it is clipped as well. None
        watches for nothing. See docs/wrong_ranks.md.

    Raises
    ------
    ValueError, TypeError
        An argument, or a parameter of the module, cannot be used; the text says why.
    ManifestError
        The ranks do not train the same thing; raised on every rank.
    ExchangeError
        A rank did not take part in time.

    Attributes
    ----------
    module : Module
        The wrapped module. Its other attributes can be read and set through the model too. Parameters that are added
        later, frozen or not, are refused at the next forward pass.
    optimizer : Optimizer, tuple of Optimizer, or None
        The optimizer that was passed, or that the factory made. Hand it to schedulers, and read and load its
        ``state_dict()``. With ``step_in_backward`` its ``step()`` has nothing left to do. Its step hooks are called
        once per step.
    algorithm : Algorithm
        The algorithm in use. If it has an attribute ``gamma``, that is the mixing factor; it may be set between steps,
        to the same value on all ranks.
    compression, topology : Compression, Topology
        Those in use.

    Notes
    -----
    Construction is collective: every rank of the process group must construct the wrapper. Without a process group the
    world has one rank. Used as a context manager, the wrapper closes itself on exit.

    Between steps ``module`` holds x(t); messages in flight have not been applied to it. Edits between steps (in-place
    writes, ``load_state_dict``, ``p.data = ...``) are kept. A deep copy or an unpickled model is detached: it has the
    module but no optimizer, hooks or communication. Send clones of tensors to other processes: a shared tensor does not
    follow later steps.

    An update whose gradients are not finite is skipped, and messages that are not finite are refused. Both are counted
    in :meth:`stats`; 16 such steps in a row raise an error. (On a GPU neither is checked, because the check would block
    the host.)

    An optimizer that has a method ``pre_average_hook`` is shown what was communicated, see
    :class:`gossip.UsesExchange`.

    References
    ----------
    Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017.

    Examples
    --------
    >>> from functools import partial
    >>> model = GossipDataParallel(nn.Linear(3, 1), partial(torch.optim.SGD, lr=0.1), topology="ring")
    >>> model(torch.ones(2, 3)).sum().backward()
    >>> model.step
    1
    """

    @names_arguments(OF_DDP)
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
        soft_deadline: timedelta | float | Literal["auto"] | None = None,
        partition_timeout: timedelta | float | None = None,
        on_preemption: Callable[[GossipDataParallel], object] | None = None,
        authenticate: bool = True,
        record: str | Path | None = None,
        mesh: DeviceMesh | None = None,
        shard: Literal["optimizer", "none"] | None = None,
        max_difference: Literal["warn", "clip"] | float | None = "warn",
    ) -> None:
        given = dict(locals())
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        arguments = Arguments(**{entry.name: given[entry.name] for entry in dataclasses.fields(Arguments)})
        world, local = make_worlds(arguments, timeout, process_group)
        try:
            parts = construct(module, arguments, world, local)
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
        self._kept = KeptObjects()
        # Parameters hold their hooks, the hooks the engine, and the engine the parameters: a cycle that the garbage
        # collector cannot see through. The hooks do not reference the wrapper, so that its finalizer can remove them.
        self._finalizer = weakref.finalize(self, give_back, parts.engine, world, parts.optimizers)
        self._finalizer.atexit = False
        self._forward = torch.compiler.disable(forward_like(GossipDataParallel.forward, module), recursive=False)
        self._generations: GenerationChange | None = None
        if world.changes:
            from gossip.step.generation_change import GenerationChange

            try:
                generations = GenerationChange(self, world, parts, arguments, self._kept)
                generations.begin()
                self._generations = generations
            except BaseException:
                self._finalizer()
                raise
        self.module = module  # set last: from here on, attributes that are not ours are set in the module

    # ------------------------------------------------------------------ identity

    @property
    def rank(self) -> int:
        """The rank of this process among the ranks that train."""
        if self._engine is None:
            return 0
        return self._world.rank if self._generations is None else self._generations.rank

    @property
    def world_size(self) -> int:
        """The number of ranks that train."""
        return len(self.members)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that train, numbered as at the beginning; the position in the tuple is the rank in the topology."""
        if self._engine is None:
            return (0,)
        return self._world.members if self._generations is None else self._generations.members

    @property
    def world(self) -> World:
        """The ranks, for your own collectives between steps; released by :meth:`close`.

        A rank that joins takes part in collectives after its first step, or from it on if it returns within its loop
        (``partition_timeout=``): between the others' last step without it and their first one with it, :attr:`members`
        has it already, and the world's members, once a collective of that time has begun, do not.
        """
        self._live()
        return self._world

    @property
    def step(self) -> int:
        """The number of steps made, which is also the index of the next round."""
        return self._engine.step if self._engine is not None else self._detached_step

    @property
    def grad_norm(self) -> float | None:
        """The Euclidean norm of this rank's gradients in the newest step, before clipping; None if it had none."""
        meter = self._live().last_meter
        return None if meter is None else meter.gradient_norm()

    def stats(self) -> StepStats | None:
        """Return what the newest step cost on this rank; None before the first. Local."""
        engine = self._live()
        return None if engine.last_meter is None else engine.last_meter.stats(engine.step - 1)

    def memory(self) -> MemoryUse:
        """Return what this rank holds between steps, now and in training, by purpose; ``print`` shows a table. Local.

        Room is made when it is first needed, in the first steps; what they will make is predicted, see
        :class:`gossip.MemoryUse`, which takes seconds for a large model. What exists within a step only is not
        included: activations, most gradients.
        """
        return self._live().memory(keeps_gradients=not self._arguments.step_in_backward)

    # ------------------------------------------------------------------ training

    @ForwardOfModule
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with these arguments. Local."""
        engine = self._engine
        if engine is None:
            return self.module(*args, **kwargs)
        self.check_outermost(is_sharded_inside=engine.group.is_sharded_inside)
        engine.begin_forward()
        call = engine.forward_waits.watched(self.module)
        with fast_range("gossip::forward"):
            output = call(*args, **kwargs)
        engine.end_forward(output)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes within the block only accumulate gradients. Local; read when backward runs.

        The first backward pass outside makes one step from all of them. With ``step_in_backward=False`` backward passes
        always only accumulate; with ``mesh`` the last one before ``optimizer.step()`` must be outside then too, since
        it averages the gradients over the group.
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

        The rank exchanges, and updates only parameters with gradients that ``no_sync`` accumulated; with
        ``step_in_backward=False`` it updates none, and all ranks of a group must be idle together.
        """
        engine = self._live()
        engine.check_usable()
        engine.check_places()
        engine.idle_step()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip all gradients of this rank, between ``backward()`` and ``optimizer.step()``. Local.

        Returns
        -------
        Tensor, []
            The norm before clipping.

        Raises
        ------
        GossipError
            Steps are made in ``backward()``: the gradients have been released.
        """
        if self._live() and self._arguments.step_in_backward:
            raise GossipError(
                "clip_grad_norm_ finds no gradients, because the updates were made inside backward; pass "
                f"clip_grad_norm={max_norm:g} to GossipDataParallel, or step_in_backward=False to keep the usual loop"
            )
        return self._live().updater.clip_(max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. Local."""
        super().zero_grad(set_to_none)
        if self._engine is not None and self._engine.module is not self.module:
            self._engine.module.zero_grad(set_to_none)

    # ------------------------------------------------------------------ values and copies

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the module's own parameters under the module's own names. Local.

        Messages that the algorithm must combine before the parameters are read are awaited first; reading
        ``model.module`` directly between steps does not include them yet.
        """
        if self._engine is not None:
            if self._arguments.step_in_backward and self._arguments.clip_grad_norm is None:
                self._engine.note_reading()
            self._engine.combine_if_due()
        return super().named_parameters(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state_dict into the module. Local: load the same one on every rank.

        Local and outer steps go on from the new values. Keys that all begin with ``module.``, as
        DistributedDataParallel writes them, are accepted too. Even with ``assign`` the values are copied, because the
        parameters stay in the buckets.
        """
        if self._engine is not None and self._engine.error is None:
            self._engine.settle()  # what must be combined before the values are read must be before they are replaced
        result = super().load_state_dict(state_dict, strict, assign)
        if self._engine is not None:
            self._engine.settle()
            self._engine.exchanges.averaged()
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
        self._kept = KeptObjects()
        self._forward = forward_like(GossipDataParallel.forward, state["module"])
        self.module = state["module"]

    # ------------------------------------------------------------------ the end

    @torch.inference_mode(False)
    def leave(self) -> None:
        """Leave the other ranks, which continue without this one, and close the model. Local.

        Requires ``on_peer_loss="continue"``, and must be called between two steps. Nothing is lost: this rank
        exchanges, without updates, until the step from which the others proceed without it.

        Raises
        ------
        GossipError
            Too few ranks would remain, all are about to end together (SIGTERM), or ``on_peer_loss`` is "raise".
        """
        self._live().check_between_steps()
        if self._generations is None:
            raise GossipError(
                'leave() needs ranks that continue without this one; pass on_peer_loss="continue" to GossipDataParallel'
            )
        self._generations.leave()
        self.close()

    def close(self) -> None:
        """Remove the hooks and end communication; the module trains plainly afterwards. Local.

        Messages in flight are awaited and dropped (or combined, if the algorithm requires that before the next forward
        pass). A model that is no longer referenced is closed without waiting.

        Raises
        ------
        ExchangeError
            A message in flight did not arrive; the model is closed nevertheless.
        CheckpointError
            What :func:`gossip.save` wrote in the background is not complete; the model is closed.
        """
        engine = self._engine
        if engine is None:
            return
        try:
            if engine.error is None and not engine.is_parents:
                engine.settle(closes=True)
                engine.drop_in_flight()
                if self._generations is not None:
                    self._generations.end()
        finally:
            self._finalizer()
        self._kept.wait_for_save()

    def __enter__(self) -> GossipDataParallel:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._engine is not None:
            self._finalizer()

    def _live(self) -> StepEngine:
        if self._engine is None:
            raise GossipError(
                "this GossipDataParallel is a detached copy: it has no optimizer and no peers; wrap its .module to "
                "train it"
            )
        return self._engine
