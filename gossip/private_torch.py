"""Every private part of torch that this package uses, in one place.

Changes that torch makes without notice affect only this module. Of what it uses, one thing differs from torch 2.10 to
2.15: where a part of ``fully_shard`` keeps its groups of parameters.
"""

import sys
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors as flatten_tensors
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

__all__ = ["flatten_tensors", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]

#: Open a named profiler range within a ``with`` block, by torch's faster implementation: every bucket opens four ranges
#: in every step, and without a profiler they must cost nothing.
fast_range: Callable[[str], AbstractContextManager[Any]] = torch._C._profiler._RecordFunctionFast


def profile_all_threads() -> Any:
    """Return what ``torch.profiler.profile(experimental_config=...)`` takes to record the ranges of every thread."""
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


# ---------------------------------------------------------------------- backward passes

OUTSIDE_BACKWARD = -1


def backward_task() -> int:
    """Return the number of the backward pass that runs in this thread, or ``OUTSIDE_BACKWARD``."""
    return torch._C._current_graph_task_id()


def is_in_backward() -> bool:
    """Return whether a backward pass runs in this thread."""
    return backward_task() != OUTSIDE_BACKWARD


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Schedule ``call`` for the moment when the backward pass of this thread has computed all its gradients.

    It is called after what others have scheduled for then, in whichever order: ``fully_shard`` reduces its last
    gradients there. A pass that an exception ends releases ``call`` without calling it.
    """
    schedule = torch.autograd.Variable._execution_engine.queue_callback
    schedule(lambda: schedule(call))


def multiply_(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply all tensors by ``factor``, in place, in as few kernels as possible."""
    torch._foreach_mul_(tensors, factor)


# ---------------------------------------------------------------------- the compiler

COMPILER = "torch._dynamo"
"""The module of torch's compiler; importing it takes a second."""


def norms_of(tensors: list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return the Euclidean norm of each tensor, by few kernels; they are on one device and have one dtype."""
    return tuple(torch._foreach_norm(tensors, 2.0, dtype))


def is_autograd_compiled() -> bool:
    """Return whether backward passes are compiled, which calls no parameter hooks. Does not import the compiler."""
    dynamo = sys.modules.get(COMPILER)
    return dynamo is not None and bool(dynamo.config.compiled_autograd)


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` has been applied to the module."""
    return isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None


def keep_out_of_graphs(code: types.CodeType) -> None:
    """Keep the compiler from ever tracing this code; each call costs less than with ``torch.compiler.disable``."""
    torch._dynamo.eval_frame.skip_code(code)


# ---------------------------------------------------------------------- modules and other wrappers


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the module's own parameters, without its children's: the dictionary in which it looks them up."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the module's own buffers, as :func:`own_parameters` does its parameters."""
    return module._buffers


def own_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the module's own children, as :func:`own_parameters` does its parameters."""
    return module._modules


def names_of_transient_buffers(module: nn.Module) -> set[str]:
    """Return the names of those of the module's own buffers that no state_dict contains."""
    return module._non_persistent_buffers_set


def active_ddp() -> nn.Module | None:
    """Return the DistributedDataParallel whose forward pass is running, or None."""
    found: nn.Module | None = DistributedDataParallel._active_ddp_module
    return found


def is_sharded(module: nn.Module) -> bool:
    """Return whether torch's FSDP, of either version, manages the parameters of this module."""
    return "_is_fsdp_managed_module" in module.__dict__


# ---------------------------------------------------------------------- optimizers

SUPPORTS_SCALING = "_step_supports_amp_scaling"
"""An attribute by which a GradScaler leaves the division by the scale to the optimizer's ``step()``."""

FLAG_OF_FUSED = "_need_device_dtype_check_for_fused"
"""An attribute that torch's fused optimizers set in their first step."""


def step_pre_hooks(optimizer: Optimizer) -> Mapping[int, Any]:
    """Return the hooks that are called before the optimizer's steps."""
    return optimizer._optimizer_step_pre_hooks


def without_step_hooks(attributes: MutableMapping[str, Any]) -> None:
    """Remove the step hooks from these attributes of an optimizer."""
    attributes["_optimizer_step_pre_hooks"] = type(attributes["_optimizer_step_pre_hooks"])()
    attributes["_optimizer_step_post_hooks"] = type(attributes["_optimizer_step_post_hooks"])()


def is_watched_by_scheduler(step: Callable[..., Any]) -> bool:
    """Return whether a scheduler has wrapped this ``step`` of an optimizer in order to notice its calls."""
    return hasattr(step, "_wrapped_by_lr_sched")


def note_watched_by_scheduler(step: Callable[..., Any]) -> None:
    """Mark this function so that schedulers treat it as one that they have wrapped."""
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def note_step_called(optimizer: Optimizer) -> None:
    """Note what a scheduler's wrapper notes in every call, so that the scheduler does not warn."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- process groups


def known_groups() -> list[dist.ProcessGroup]:
    """Return all groups that this process has joined and not left. Local."""
    return [group for group in distributed_c10d._world.pg_map if isinstance(group, dist.ProcessGroup)]


def default_store() -> dist.Store:
    """Return the key-value store of the default process group. Local."""
    return distributed_c10d._get_default_store()


def bound_waits(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let collectives of this group that do not end within ``timeout`` raise from now on, whoever calls them. Local."""
    distributed_c10d._set_pg_timeout(timeout, group)


def begin_coalescing(group: Any, device: torch.device) -> None:
    """Make a group collect the sends and receives that follow, to post them together."""
    group._start_coalescing(device)


def end_coalescing(group: Any, device: torch.device) -> dist.Work:
    """Post the collected operations and return the handle of all of them."""
    work: dist.Work = group._end_coalescing(device)
    return work


# ---------------------------------------------------------------------- fully_shard


class FSDPParameter:
    """A parameter that ``fully_shard`` manages, with the memory that it is gathered from."""

    def __init__(self, managed: Any) -> None:
        self._managed = managed

    @property
    def sharded(self) -> torch.Tensor:
        """The DTensor that the module has between passes."""
        sharded: torch.Tensor = self._managed.sharded_param
        return sharded

    def padded(self) -> torch.Tensor:
        """The rows of this rank, with rows of zeros up to as many as the first rank has."""
        gathered: torch.Tensor = self._managed._sharded_param_data
        return gathered.view(self._managed.padded_sharded_param_size)

    def address(self) -> int:
        """Where the rows that are gathered begin."""
        gathered: torch.Tensor = self._managed._sharded_param_data
        return gathered.data_ptr()

    def place(self, home: torch.Tensor) -> None:
        """Gather from ``home``, of the shape of :meth:`padded`, from now on."""
        managed = self._managed
        local = managed.sharded_param._local_tensor
        dimension = managed.fsdp_placement.dim
        length = local.size(dimension) if local.numel() else 0
        managed._sharded_param_data = home.view(-1)
        managed.sharded_param._local_tensor = home.narrow(dimension, 0, length)

    def take_gradient(self) -> torch.Tensor | None:
        """The gradient of this rank's rows, padded, which the parameter no longer has then."""
        managed = self._managed
        gradient = managed.sharded_param.grad
        if gradient is None:
            return None
        managed.sharded_param.grad = None
        local: torch.Tensor = gradient._local_tensor
        if local.shape == managed.padded_sharded_param_size:
            return local
        padded: torch.Tensor = local.new_zeros(managed.padded_sharded_param_size)
        if local.numel():
            padded.narrow(managed.fsdp_placement.dim, 0, local.size(managed.fsdp_placement.dim)).copy_(local)
        return padded

    @property
    def dimension(self) -> int:
        """Along which it is divided."""
        return int(self._managed.fsdp_placement.dim)

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """In which it is gathered, and in which its gradients are reduced."""
        policy, own = self._managed.mp_policy, self.sharded.dtype
        gathered = policy.param_dtype or own
        return gathered, policy.reduce_dtype or gathered

    @property
    def mesh(self) -> Any:
        """The mesh over which it is sharded."""
        return self._managed.mesh_info.mesh

    @property
    def is_offloaded(self) -> bool:
        """Whether it is kept in the memory of the host."""
        return bool(self._managed.offload_to_cpu)


def fsdp_modules(module: nn.Module) -> list[Any]:
    """Return the parts of a module to which ``fully_shard`` was applied."""
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def fsdp_parameters(module: nn.Module) -> Iterator[FSDPParameter]:
    """Yield what ``fully_shard`` manages of a module, each parameter once."""
    for group in _fsdp_groups(module):
        yield from map(FSDPParameter, group.fsdp_params)


def _fsdp_groups(module: nn.Module) -> Iterator[Any]:
    for part in fsdp_modules(module):
        state = part._get_fsdp_state()
        # torch 2.10 and 2.11 have a single group in each part.
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        yield from (group for group in groups if group is not None)


Failed = Callable[[str, RuntimeError], Exception | None]
"""Returns what is raised in place of an error in what the text says, or None."""


class _Replaced:
    """A collective operation of ``fully_shard`` that a function takes part in, given ``detail``."""

    def __init__(self, default: Any, function: Callable[..., Any], detail: Any) -> None:
        self.default, self._function, self._detail = default, function, detail

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["default"], name)


class _Guarded(_Replaced):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.default(*args, **kwargs)
        except RuntimeError as error:
            found = self._function(self._detail, error)
            if found is None:
                raise
            raise found from error


class _Gathering(_Replaced):
    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
        if group.size() != self._detail:  # of layers that are only resharded to a part of the ranks
            return self.default(output_tensor, input_tensor, group, async_op)
        return self._function(output_tensor.view(self._detail, -1))


class _Summing(_Replaced):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        divides = op == dist.ReduceOp.AVG
        if not (divides or op == dist.ReduceOp.SUM):
            return self.default(output_tensor, input_tensor, group, op, async_op)
        self._function(input_tensor.view(self._detail, -1), output_tensor)
        return output_tensor.div_(self._detail) if divides else output_tensor


_COLLECTIVES = {"_all_gather_comm": "gathering parameters", "_reduce_scatter_comm": "reducing gradients"}


def guard_collectives(module: nn.Module, failed: Failed) -> None:
    """Raise what ``failed`` returns in place of errors in gathering and reducing. Local."""
    for group in _fsdp_groups(module):
        for name, what in _COLLECTIVES.items():
            setattr(group, name, _Guarded(getattr(group, name), failed, what))


def gather_by(module: nn.Module, gather: Callable[[torch.Tensor], None], num_ranks: int) -> None:
    """Let ``fully_shard`` gather by a function that fills in the rows of the other ranks. Local.

    The function gets all rows, [ranks, numel], of which this rank's is filled in. A gathering that the user has set is
    left alone.
    """
    _carry(module, "_all_gather_comm", _Gathering, gather, num_ranks)


def sum_by(module: nn.Module, add_up: Callable[[torch.Tensor, torch.Tensor], None], num_ranks: int) -> None:
    """Let ``fully_shard`` sum and average gradients by a function. Local.

    The function gets a row for each rank, [ranks, numel], and puts the sum of this rank's rows into its second
    argument, [numel]. A reduction that the user has set is left alone.
    """
    _carry(module, "_reduce_scatter_comm", _Summing, add_up, num_ranks)


def _carry(module: nn.Module, name: str, kind: type[_Replaced], function: Callable[..., None], num_ranks: int) -> None:
    for group in _fsdp_groups(module):
        present = getattr(group, name)
        if type(present).__name__ in ("DefaultAllGather", "DefaultReduceScatter"):
            setattr(group, name, kind(present, function, num_ranks))


def restore_collectives(module: nn.Module) -> None:
    """Undo :func:`guard_collectives`, :func:`gather_by` and :func:`sum_by`. Local."""
    for group in _fsdp_groups(module):
        for name in _COLLECTIVES:
            while isinstance(present := getattr(group, name), _Replaced):
                setattr(group, name, present.default)


def call_gradient_hooks(parameter: torch.Tensor) -> None:
    """Call the hooks that ``register_post_accumulate_grad_hook`` has registered."""
    for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)


def mirror_module(module: nn.Module, mirror: nn.Module, replacements: Mapping[int, nn.Parameter]) -> None:
    """Give ``mirror`` the tree of ``module``: the same buffers, live, and by the id of each parameter its replacement.

    Parts that occur twice, and parameters that are tied, stay so.
    """
    known = {module: mirror}
    for part in module.modules():
        twin = known.setdefault(part, mirror if part is module else nn.Module())
        for key, parameter in part._parameters.items():
            twin._parameters[key] = None if parameter is None else replacements[id(parameter)]
        twin._buffers = part._buffers
        twin._non_persistent_buffers_set = part._non_persistent_buffers_set
        for key, child in part._modules.items():
            twin._modules[key] = None if child is None else known.setdefault(child, nn.Module())
