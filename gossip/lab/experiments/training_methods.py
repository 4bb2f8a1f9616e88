"""Training methods behind one small interface: gossip, all-reduce (torch's DDP) and no exchange at all.

All ranks of a run may be in one process, with the same data, initial values and steps as with one process per rank.
"""

import contextlib
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from loguru import logger
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gossip import AdaptWhileCommunicating, GossipDataParallel, Uncompressed, VirtualWorkers, World, make_shard_mesh
from gossip.communication.waiting import is_lost_connection
from gossip.lab.experiments.evaluation import Evaluation, evaluate, evaluate_replicas
from gossip.lab.experiments.experiment_build import Experiment
from gossip.lab.experiments.records import TOGETHER_FILE
from gossip.lab.experiments.run_settings import ALL_REDUCE_OPTIONS, changed_options, options_of_virtual_workers
from topologies import Round, Topology


class Method(ABC):
    """A training method: how the replicas on the ranks learn from each other.

    Attributes
    ----------
    name : str
        The stem of the names of this process's files.
    ranks : range
        The ranks whose replicas are trained in this process.
    model : GossipDataParallel, VirtualWorkers or None
        The object that checkpoints save; None for a method without checkpoints.
    module : Module
        The bare replica of the rank; with several ranks in this process, a module that holds the mean of their
        replicas once it has been requested.
    optimizer : Optimizer
        The optimizer, for use by a scheduler; the method steps it itself.
    world : World
        All processes of the run, until the method is closed.
    groups : World
        The processes among which the samples are divided when the mean of the replicas is evaluated.
    """

    name: str
    ranks: range
    model: GossipDataParallel | VirtualWorkers | None
    module: nn.Module
    optimizer: Optimizer
    world: World
    groups: World

    def _be_one_rank(self, world: World) -> None:
        """Train the replica of this process's rank alone."""
        self.world = world
        self.name, self.ranks = f"rank{world.member}", range(world.rank, world.rank + 1)

    @property
    def exchanging(self) -> GossipDataParallel | VirtualWorkers:
        """The model, of a method that has one."""
        assert self.model is not None
        return self.model

    @property
    def members(self) -> tuple[int, ...]:
        """The processes that train now, by their numbers at the beginning."""
        return self.world.members

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the replicas, for training. Local, or collective where buffers are shared."""
        outputs: torch.Tensor = self.exchanging(inputs)
        return outputs

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> dict[str, Any]:
        """Make one step. Every process must make the same number of steps.

        Returns the costs of the step: those fields of :class:`gossip.StepStats` that this method measures, with string
        keys. How long ``forward`` took is known to its caller.
        """

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> list[Evaluation]:
        """Evaluate each replica of this process on all samples. Local."""
        return [evaluate(self.module, inputs, targets)]

    def consensus_distance(self) -> tuple[float, float]:
        """Return the root mean square distance of the replicas from their mean, absolute and relative. Collective.

        The relative distance is divided by the norm of the mean.
        """
        return self.exchanging.consensus_distance()

    def averaged(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager in whose block ``module`` holds the mean of the replicas. Collective."""
        return self.exchanging.averaged()

    def global_avg(self) -> None:
        """Replace every replica by the mean of all replicas. Collective."""
        self.exchanging.global_avg()

    def close(self) -> None:
        """End communication. Local."""
        self.world.close()


def make_method(experiment: Experiment) -> Method:
    """Make the training method of the settings for one rank. Collective."""
    seed = experiment.settings.seed
    torch.manual_seed(seed)
    module = experiment.make_module()
    if experiment.settings.method == "ddp":
        world = World(experiment.settings.timeout)
        if world.rank == 0:
            _say_what_is_ignored(experiment)
        method: Method = AllReduceMethod(experiment, module, world)
    else:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        num_groups = world_size // experiment.settings.launch.local_size
        method = GossipMethod(experiment, module, experiment.topology or without_exchange(num_groups))
    torch.manual_seed((seed * 1_000_003 + method.world.rank + 1) % 2**63)  # dropout must differ between ranks
    return method


def without_exchange(world_size: int) -> Topology:
    """Return a topology of identity rounds, for replicas that are trained without communication."""
    return Topology.from_rounds([Round.identity(world_size)], name="no exchange")


def _say_what_is_ignored(experiment: Experiment) -> None:
    """Log the options that the user has changed and that method=ddp ignores."""
    algorithm, compression = experiment.algorithm.describe(), experiment.compression
    ignored = [] if algorithm == AdaptWhileCommunicating().describe() else [f"algorithm {algorithm}"]
    ignored += [] if isinstance(compression, Uncompressed) else [f"compression {compression.describe()}"]
    changed = changed_options(experiment.wrapper_options)
    ignored += [option for name, option in changed.items() if name not in ALL_REDUCE_OPTIONS]
    if ignored:
        logger.info("without meaning for method=ddp, and ignored: {}", ", ".join(ignored))


def grouped(module: nn.Module, local_size: int, shard: str) -> dict[str, Any]:
    """Return the wrapper's options for groups of ranks; with shard=fsdp, apply ``fully_shard`` first. Collective."""
    mesh = make_shard_mesh(local_size, next(module.parameters()).device.type)
    if shard != "fsdp":
        return {"mesh": mesh, "shard": shard}
    shard_parts(module, mesh["shard"])
    return {"mesh": mesh}


def shard_parts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Apply ``fully_shard`` to each part of a sequence or list of modules, and then to the rest. Collective."""
    from torch.distributed.fsdp import FSDPModule, fully_shard  # slow to import

    for container in module.modules():
        for part in container if isinstance(container, nn.Sequential | nn.ModuleList) else ():
            if next(part.parameters(), None) is not None and not isinstance(part, FSDPModule):
                fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)


def bytes_of_all_reduce(parameters: Iterable[torch.Tensor], world_size: int) -> int:
    """Return how much one rank sends in a ring all-reduce of the gradients: 2 (n - 1) / n times their bytes."""
    gradient_bytes = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    return round(2 * (world_size - 1) / world_size * gradient_bytes)


class AllRanks(World):
    """The ranks of all shard groups that train, as one world made of the two that each of them is in.

    ``groups`` are the ranks that hold the same shard as this one, and ``mates`` those of its group.
    """

    def __init__(self, groups: World, mates: World) -> None:
        self._groups, self._mates = groups, mates
        self._note()

    def _note(self) -> None:
        size = self._mates.world_size
        self.rank, self.world_size = self._groups.rank * size + self._mates.rank, self._groups.world_size * size

    @property
    def member(self) -> int:
        return self._groups.member

    @property
    def changes(self) -> bool:
        return True

    def keys(self, name: str) -> dist.Store | None:
        return self._groups.keys(name)

    def gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        def gather() -> list[bytes]:
            of_group = [each.hex() for each in self._mates.gather_bytes(payload, what)]
            return [bytes.fromhex(each) for group in self._groups.gather_json(of_group, what) for each in group]

        gathered = self._groups.collectively(gather)
        self._note()
        return gathered

    def close(self) -> None:
        """Do nothing: both belong to the model."""


class GossipMethod(Method):
    """Gossip with :class:`gossip.GossipDataParallel`; with identity rounds every rank trains alone."""

    model: GossipDataParallel
    save_and_end: Callable[[], NoReturn]
    """Called on all ranks together, where that is asked of the wrapper, once too many of them have got SIGTERM."""

    def __init__(self, experiment: Experiment, module: nn.Module, topology: Topology) -> None:
        settings, options = experiment.settings, dict(experiment.wrapper_options)
        self._steps_in_backward, self._max_norm = options["step_in_backward"], options["clip_grad_norm"]
        if not self._steps_in_backward:
            options["clip_grad_norm"] = None  # backward clips
        if settings.launch.local_size > 1:
            options |= grouped(module, settings.launch.local_size, settings.shard)
        if settings.checkpoint.every and options.get("on_peer_loss") == "continue":
            options["on_preemption"] = lambda _: self.save_and_end()
            module.register_forward_pre_hook(self._on_evaluation)
        options |= {"algorithm": experiment.algorithm, "compression": experiment.compression}
        options["timeout"] = settings.timeout
        self.model = experiment.make_wrapper(module, experiment.make_optimizer, topology, **options)
        assert self.model.optimizer is not None
        self.module, self.optimizer, self.groups = module, self.model.optimizer, self.model.world
        self._local_size = settings.launch.local_size
        world: Any = self.groups
        if self._local_size > 1:
            world = AllRanks(world, world.shard_group) if world.changes else World(settings.timeout)
        self._be_one_rank(world)

    def _on_evaluation(self, *_: object) -> None:
        """End an evaluation, in which the wrapper is not called, if all ranks are to end."""
        if not torch.is_grad_enabled():
            self.model._live().on_forward()

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that train now."""
        size = self._local_size
        return tuple(group * size + place for group in self.model.members for place in range(size))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.model.algorithm.weighted:
            self.model.weigh(len(inputs))
        return super().forward(inputs)

    def backward(self, loss: torch.Tensor) -> dict[str, Any]:
        """Make one step; update and exchange happen inside the backward pass, or after it."""
        loss.backward()
        if not self._steps_in_backward:
            if self._max_norm is not None:
                self.model.clip_grad_norm_(self._max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        stats = self.model.stats()
        assert stats is not None
        costs = stats.to_dict()
        del costs["step"]
        for key, value in costs.items():
            if isinstance(value, Mapping):
                costs[key] = {str(peer): of_peer for peer, of_peer in sorted(value.items())}
        return costs

    def close(self) -> None:
        """Remove the hooks and end communication."""
        self.model.close()
        if self.world is not self.groups:
            self.world.close()


class AllReduceMethod(Method):
    """All-reduce with torch's DistributedDataParallel: gradients are averaged, so the replicas stay equal.

    Buffers (batch norm's running statistics) are broadcast from rank 0 at the beginning of each forward pass and
    diverge during it, so that averaging the replicas only needs to average the buffers. The exposed wait is the time
    from the moment when the last gradient bucket is ready on this rank to the end of the backward pass.
    """

    def __init__(self, experiment: Experiment, module: nn.Module, world: World) -> None:
        self._be_one_rank(world)
        self.groups, self.model = world, None
        group = world.new_group(range(world.world_size))
        self._model = DistributedDataParallel(
            module, bucket_cap_mb=experiment.wrapper_options["bucket_cap_mb"], process_group=group
        )
        # A lambda has no annotations: torch compares them with its own types, but here they are strings.
        self._model.register_comm_hook(group, lambda group, bucket: self._all_reduce(group, bucket))
        self.module = module
        self.optimizer = experiment.make_optimizer(list(module.named_parameters()))
        self._bytes_per_step = bytes_of_all_reduce(module.parameters(), world.world_size)
        self._max_norm = experiment.wrapper_options["clip_grad_norm"]
        self._ready_at, self._step = 0.0, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the output of the replica. Collective if the module has buffers."""
        with self._exchange("sharing rank 0's buffers"):
            output: torch.Tensor = self._model(inputs)
        return output

    def backward(self, loss: torch.Tensor) -> dict[str, Any]:
        """Make one step: all-reduce the gradients inside the backward pass, then update."""
        start = time.perf_counter()
        with self._exchange("the all-reduce of the gradients"):
            loss.backward()
        backward_ended = time.perf_counter()
        costs: dict[str, Any] = {
            "exposed_wait_s": backward_ended - self._ready_at,
            "bytes_sent": self._bytes_per_step,
            "backward_s": backward_ended - start,
        }
        if self._max_norm is not None:
            costs["gradient_norm"] = float(nn.utils.clip_grad_norm_(self.module.parameters(), self._max_norm))
        update_began = time.perf_counter()
        self.optimizer.step()
        costs["update_s"] = time.perf_counter() - update_began
        self.optimizer.zero_grad()
        self._step += 1
        return costs

    def consensus_distance(self) -> tuple[float, float]:
        """Return 0: the parameters are equal. Local."""
        return 0.0, 0.0

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Hold the mean of the ranks' buffers within the block; the parameters are equal anyway. Collective."""
        saved = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        self.global_avg()
        try:
            yield
        finally:
            for buffer, values in saved:
                buffer.copy_(values)

    def global_avg(self) -> None:
        """Average the buffers over the ranks; the parameters are equal anyway. Collective."""
        for name, buffer in self.module.named_buffers():
            if buffer.is_floating_point():
                self.world.average_(buffer, f"averaging buffer {name!r}")
        others = (buffer for buffer in self.module.buffers() if not buffer.is_floating_point())
        self.world.broadcast_(others, "broadcasting buffers from rank 0")

    @contextlib.contextmanager
    def _exchange(self, what: str) -> Iterator[None]:
        """Convert a lost connection to an error of the exchange; errors of this rank's own model pass through."""
        try:
            yield
        except RuntimeError as error:
            if not is_lost_connection(error):
                raise
            raise self.world.lost_by(error, f"step {self._step}: {what} failed") from error

    def _all_reduce(self, group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._ready_at = time.perf_counter()
        return allreduce_hook(group, bucket)


class VirtualMethod(Method):
    """Training with :class:`gossip.VirtualWorkers`; with method=ddp their gradients are averaged, and nothing else.

    Until ``until_the_end`` is closed, torch has the configured number of threads, and does not warn of its performance.
    """

    model: VirtualWorkers

    def __init__(self, experiment: Experiment, until_the_end: contextlib.ExitStack) -> None:
        settings = experiment.settings
        until_the_end.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="There is a performance drop")  # torch.func's, of attention
        until_the_end.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(settings.launch.num_threads or torch.get_num_threads())
        torch.manual_seed(settings.seed)
        self._is_all_reduced = settings.method == "ddp"
        options = options_of_virtual_workers(experiment.wrapper_options)
        if self._is_all_reduced:
            options = {name: options[name] for name in ALL_REDUCE_OPTIONS}
        self.model = VirtualWorkers(
            experiment.make_module,
            settings.launch.world_size,
            experiment.make_optimizer,
            experiment.topology or without_exchange(settings.launch.world_size),
            algorithm=experiment.algorithm,
            compression=experiment.compression if settings.method == "gossip" else None,
            devices=[experiment.data.train_inputs.device],
            **options,
        )
        self.module = self.model.module
        self.optimizer = self.model.optimizer
        self.world = self.groups = World(settings.timeout)
        self.name, self.ranks = TOGETHER_FILE.removesuffix(".jsonl"), range(settings.launch.world_size)
        if self._is_all_reduced:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.register_post_accumulate_grad_hook(_average_gradients)
        logger.info("{} replicas in one process, {} steps", settings.launch.world_size, experiment.total_steps)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.model.algorithm.weighted:
            parts = inputs.tensor_split(self.model.world_size)
            self.model.weigh([max(1, len(part)) for part in parts])  # one without samples has no update
        return super().forward(inputs)

    def backward(self, loss: torch.Tensor) -> dict[str, Any]:
        """Make one step.

        Returns the time of the backward pass, the bytes that one rank of a cluster would send in this step, and the
        numbers of skipped updates and refused messages.
        """
        start = time.perf_counter()
        loss.backward()
        backward_s = time.perf_counter() - start
        stats = self.model.stats()
        assert stats is not None
        costs: dict[str, Any] = {"backward_s": backward_s, **asdict(stats)}
        if self._is_all_reduced:
            costs["bytes_sent"] = bytes_of_all_reduce(self.module.parameters(), len(self.ranks))
        del costs["step"]
        return costs

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> list[Evaluation]:
        """Evaluate all replicas in one batched forward pass per batch of samples."""
        return evaluate_replicas(self.model, inputs, targets)


def _average_gradients(parameter: torch.Tensor) -> None:
    """Replace stacked gradients [n, ...] by their mean, as an all-reduce would."""
    assert parameter.grad is not None
    parameter.grad.copy_(parameter.grad.mean(0, keepdim=True).expand_as(parameter.grad))
