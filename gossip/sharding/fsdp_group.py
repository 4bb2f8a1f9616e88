"""The ranks that hold one replica together, each a shard of it: what ``fully_shard`` has divided."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from gossip import private_torch
from gossip.communication.waiting import Ended, is_lost_connection
from gossip.communication.world import World
from gossip.errors import ExchangeError, GossipError
from gossip.parameters.buckets import MIXABLE_DTYPES, Bucket
from gossip.parameters.names import named_parameters
from gossip.sharding.local_group import PartitionedGroup, Steps
from gossip.sharding.shard_mesh import Division


class FSDPShards(nn.Module):
    """What this rank holds of a sharded module, under the names of the module.

    Its parameters are plain tensors, [rows of this rank, padded to those of the first rank, ...], in the memory from
    which FSDP gathers. Its buffers are the module's. A gradient that FSDP has reduced over the shard group becomes the
    gradient of the plain parameter, whose hooks are then called.

    All parameters are managed by ``fully_shard`` over one mesh dimension. ValueError if the gradients of one cannot be
    reduced, because they are of another dtype than a bucket may have.
    """

    _module: nn.Module

    def __init__(self, module: nn.Module, num_shards: int) -> None:
        super().__init__()
        object.__setattr__(self, "_module", module)
        sources = {id(each.sharded): each for each in private_torch.fsdp_parameters(module)}
        _check_gradients(module, sources)
        local_of = {key: nn.Parameter(each.padded(), each.sharded.requires_grad) for key, each in sources.items()}
        private_torch.mirror_module(module, self, local_of)
        self._shards = [
            (name, sources[id(sharded)], local_of[id(sharded)]) for name, sharded in named_parameters(module)
        ]
        self.divisions = {
            name: Division.even(each.dimension, each.sharded.shape[each.dimension], num_shards)
            for name, each, _ in self._shards
        }
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Let FSDP gather from the memory in which the plain parameters lie now, and watch for gradients. Local."""
        for _, each, local in self._shards:
            each.place(local.data)
            if local.requires_grad:
                self._handles.append(each.sharded.register_post_accumulate_grad_hook(partial(_receive, each, local)))

    def reshard(self) -> None:
        """Drop what FSDP has gathered: values are about to change. Local."""
        for part in private_torch.fsdp_modules(self._module):
            part.reshard()

    def check(self) -> None:
        """Raise GossipError if a parameter was replaced (``assign=True``, ``module.to()``) or unfrozen. Local."""
        for name, each, local in self._shards:
            if each.sharded.requires_grad and not local.requires_grad:
                raise GossipError(
                    f"parameter {name!r} was unfrozen after the module was wrapped, but is in no bucket; close() the "
                    "model and wrap the module again, or let it require a gradient before wrapping and freeze it then"
                )
            if each.address() != local.data_ptr():
                raise GossipError(
                    f"parameter {name!r} has left the memory from which it is exchanged (load_state_dict with "
                    "assign=True, or module.to()); copy values in place, or close() the model and wrap the module again"
                )

    def close(self) -> None:
        """Remove the hooks; the module keeps its values, in the memory that the plain parameters have now. Local."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for _, each, local in self._shards:
            each.place(local.data)


@torch.no_grad()
def _receive(source: private_torch.FSDPParameter, local: nn.Parameter, _: torch.Tensor) -> None:
    """Hand a reduced gradient to the plain parameter."""
    if (gradient := source.take_gradient()) is not None:
        local.grad = gradient if local.grad is None else local.grad.add_(gradient)
        private_torch.call_gradient_hooks(local)


def _check_gradients(module: nn.Module, sources: Mapping[int, private_torch.FSDPParameter]) -> None:
    """Refuse what ``fully_shard`` could not gather and reduce; it would fail in the middle of a pass."""
    for name, parameter in named_parameters(module):
        dtypes = sources[id(parameter)].dtypes if parameter.requires_grad else ()
        for option, dtype in zip(("param_dtype", "reduce_dtype"), dtypes, strict=False):
            if dtype not in MIXABLE_DTYPES:
                names = ", ".join(str(allowed).removeprefix("torch.") for allowed in MIXABLE_DTYPES)
                raise ValueError(
                    f"parameter {name!r} is sharded with {option} {dtype}; only {names} can be gathered and reduced "
                    "over a shard group: choose one of them in its MixedPrecisionPolicy"
                )


class FSDPGroup(PartitionedGroup):
    """A group whose replica ``fully_shard`` has divided over ``mesh["shard"]``: each rank trains and sends a shard."""

    is_sharded_inside = True
    replica: FSDPShards

    def __init__(self, module: nn.Module, mesh: DeviceMesh, world: World) -> None:
        _check_sharding(module, mesh)
        kind, membership = mesh.device_type, world.membership
        if kind != "cpu" and membership is not None and membership.backends.get(kind) == "gloo":
            raise ValueError(
                f"mesh: fully_shard crashes where gloo carries tensors of {kind} devices (pytorch #132471); initialise "
                f'the process group with backend="cpu:gloo,{kind}:nccl"'
            )
        super().__init__(module, FSDPShards(module, world.world_size), world)
        self.divisions = self.replica.divisions
        self._step = 0

    def attach(self, buckets: Iterable[Bucket], steps: Steps) -> None:
        super().attach(buckets, steps)
        self.replica.attach()
        if self.rows.gathers_in_memory:
            private_torch.gather_by(self.module, self._gather, self.world.world_size)
        if self.rows.sums_in_memory:
            private_torch.sum_by(self.module, self._sum, self.world.world_size)
        watch_collectives(self.module, self.world, lambda: f"step {self._step}")

    def _gather(self, rows: torch.Tensor) -> None:
        self.rows.begin_gather(rows, f"step {self._step}: gathering parameters {in_words(self.world)}")()

    def _sum(self, rows: torch.Tensor, total: torch.Tensor) -> None:
        self.rows.begin_sum(rows, f"step {self._step}: reducing gradients {in_words(self.world)}", out=total)()

    def before_forward(self, step: int) -> None:
        """Drop what was gathered before the newest step; GossipError if a parameter is elsewhere now. Local."""
        self.replica.check()
        if step != self._step:
            self._step = step
            self.replica.reshard()

    def changed(self) -> None:
        self.replica.reshard()

    def close(self) -> None:
        """Remove the hooks, and let the module keep what it has. Local."""
        if self._handles:
            private_torch.restore_collectives(self.module)
        self.replica.close()
        super().close()


def _check_sharding(module: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse a module that is not sharded over the mesh's shard dimension, and over nothing else."""
    if not private_torch.fsdp_modules(module):
        raise ValueError(
            'mesh: the module is not sharded; apply torch.distributed.fsdp.fully_shard(module, mesh=mesh["shard"]) '
            'before wrapping it; or pass shard="optimizer", which divides all but gathered parameters, or shard="none"'
        )
    shard = mesh["shard"]
    for each in private_torch.fsdp_parameters(module):
        if each.mesh.device_type != mesh.device_type:
            raise ValueError(
                f"mesh is on {mesh.device_type!r}, but the module is sharded over a mesh on {each.mesh.device_type!r}; "
                "make both with the same device_type"
            )
        if each.mesh.ndim != 1 or not torch.equal(each.mesh.mesh, shard.mesh):
            raise ValueError(
                f"mesh: the module is sharded over the ranks {each.mesh.mesh.tolist()}, which are not those of "
                f'mesh["shard"], {shard.mesh.tolist()}; apply '
                'fully_shard(..., mesh=mesh["shard"]): between the groups there is gossip, which a mesh that also '
                "replicates (hybrid sharding) would all-reduce"
            )
        if each.is_offloaded:
            raise ValueError(
                "mesh: the module was sharded with CPUOffloadPolicy, which moves shards while they are exchanged; "
                "leave offload_policy out"
            )
    managed = {id(each.sharded) for each in private_torch.fsdp_parameters(module)}
    for name, parameter in named_parameters(module):
        if id(parameter) not in managed:
            raise ValueError(
                f"mesh: parameter {name!r} is not sharded, so nothing would average its gradients within the shard "
                'group; apply fully_shard(module, mesh=mesh["shard"]) to the whole module last, without ignored_params'
            )


def watch_collectives(module: nn.Module, world: World, where: Callable[[], str]) -> None:
    """Bound the waits of a sharded module's collectives by the world's time-out, and name who lets them fail. Local.

    torch's own time-out is half an hour, and its errors name addresses. ``where`` returns the step, in words.
    ``private_torch.restore_collectives(module)`` ends it, but for the time-out.
    """
    if world.is_alone:
        return
    membership = world.membership
    assert membership is not None
    private_torch.bound_waits(membership.group, world.patience)

    def failed(what: str, error: RuntimeError) -> ExchangeError | None:
        if isinstance(error, ExchangeError) or not is_lost_connection(error):
            return None
        text = f"{where()}: {what} {in_words(world)}"
        failure = world.wait_for(Ended(error), text, lambda: world.others)
        assert failure is not None, "what it waits for has failed"
        return world.lost(failure, text)

    private_torch.guard_collectives(module, failed)


def in_words(world: World) -> str:
    """Return where a collective of a shard group takes place, for error texts. Local."""
    assert world.membership is not None
    return f"within the shard group (ranks {list(world.membership.ranks)} of the default process group)"
