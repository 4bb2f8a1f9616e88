"""A module called with the parameters of many replicas, vectorised if possible, otherwise one after the other.

A batch is divided over all replicas along a dimension, and their outputs are reassembled, in order.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from loguru import logger
from torch import nn
from torch.func import functional_call, vmap

from gossip.errors import GossipError
from gossip.parameters.extra_state import copy_extra_states, extra_states, load_extra_states
from gossip.parameters.names import named_buffers, named_parameters
from gossip.parameters.parameter_slots import ModuleSnapshot
from gossip.private_torch import own_buffers, own_parameters, tree_flatten, tree_leaves, tree_map, tree_unflatten
from gossip.step.backward_pass import tensors_in

Tensors = dict[str, torch.Tensor]


class StackedSlots(ModuleSnapshot):
    """Refuses parameters that were added, removed or reshaped since the replicas were made from the module.

    A new one would be equal for all replicas, and not be trained. Replacing one by another of the same shape has no
    effect, because calls put each replica's own parameter in its place.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._shapes = self._find_shapes()

    def check(self, *, has_copies: bool) -> None:
        """Raise GossipError if a parameter was changed, and with copies also if a part was; cheap if nothing was.

        ``has_copies`` says whether replicas are run by copies, which have the parts that the module had when it was
        copied.
        """
        if not self.has_changed():
            return
        shapes = self._find_shapes()
        for name in (*shapes, *self._shapes):
            if shapes.get(name) != self._shapes.get(name):
                what = "removed" if name not in shapes else "replaced" if name in self._shapes else "added"
                raise GossipError(
                    f"parameter {name!r} was {what} after the replicas were made, which do not follow this change; "
                    "change the module before making VirtualWorkers from it"
                )
        if has_copies:
            raise GossipError(
                "parts of the module were added, replaced or removed after its replicas had been copied in order to "
                "run one after the other; change the module before making VirtualWorkers from it"
            )
        self.remember()

    def _find_shapes(self) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in named_parameters(self._module, remove_duplicate=False)}


class ReplicaCalls:
    """Calls ``module`` as each of k replicas.

    All at once by ``torch.func.vmap``, with independent randomness for each replica. What vmap does not support
    (control flow that depends on the data, ``item()``, activation checkpointing) is detected by the first call that
    fails; from then on replicas run one by one, each with its own copy of the module.

    Parameters
    ----------
    module : Module
        One replica. Whether it and its parts are in training mode is read in every call.
    on_gradient : callable
        ``(name, rank)``: called when replicas run one after the other and a backward pass reaches a parameter of one of
        them. With vmap a backward pass reaches the parameters of all replicas.
    """

    def __init__(self, module: nn.Module, on_gradient: Callable[[str, int], None]) -> None:
        self._module = module
        self._on_gradient = on_gradient
        self._copies: dict[int, _Copy] = {}
        names = {id(tensor): name for name, tensor in (*named_parameters(module), *named_buffers(module))}
        self._snapshot = StackedSlots(module)
        self._places = {
            f"{prefix}.{key}" if prefix else key: names[id(tensor)]
            for prefix, owner in module.named_modules()
            for owned in (own_parameters(owner), own_buffers(owner))
            for key, tensor in owned.items()
            if tensor is not None
        }
        self.is_vectorised = True

    def __call__(self, ranks: range, parameters: Tensors, buffers: Tensors, inputs: Any, is_split: list[bool]) -> Any:
        """Return the module's output for some replicas, with tensors [k, ...].

        Raises GossipError: the module's parameters differ from its replicas', or its parts from those of copies that
        were made of it.

        Parameters
        ----------
        parameters, buffers : mapping of str to Tensor, [k, *shape]
            Those of these replicas. Buffers are changed in place where the module changes its own.
        is_split : list of bool
            For each tensor in the inputs, whether it has a leading dimension of replicas, or is equal for all.
        """
        self._snapshot.check(has_copies=bool(self._copies))
        if not self.is_vectorised:
            return self._one_by_one(ranks, parameters, buffers, inputs, is_split)
        saved = {name: buffer.clone() for name, buffer in buffers.items()}
        attributes = [(part, dict(vars(part))) for part in self._module.modules()]
        random_state = torch.get_rng_state()
        try:
            outputs = self._vectorised(parameters, buffers, inputs, is_split)
            _forget_tensors(attributes)
            self._copies.clear()  # made for extra states of a checkpoint: all replicas share the module's
            return outputs
        except Exception as error:
            with torch.no_grad():
                for name, values in saved.items():
                    buffers[name].copy_(values)
            for part, values_before in attributes:
                vars(part).clear()
                vars(part).update(values_before)
            torch.set_rng_state(random_state)
            outputs = self._one_by_one(ranks, parameters, buffers, inputs, is_split)  # mistakes of the user raise here
            self.is_vectorised = False
            logger.warning(
                "{} cannot be vectorised over the replicas, which run one after the other from now on: {}",
                type(self._module).__name__,
                " ".join(str(error).split())[:200],
            )
            return outputs

    def extra_states(self, rank: int) -> dict[str, Any]:
        """Return the extra states of one replica, which are the module's where replicas run at once.

        Raises TypeError: one is not plain data; the text names its module.
        """
        return extra_states(self._copies[rank].module if rank in self._copies else self._module)

    def copy_extra_states(self, rank: int, module: nn.Module) -> None:
        """Set the extra states of a copy of the module, or of the module, to those of one replica."""
        if rank in self._copies:
            copy_extra_states(module, self._copies[rank].module)

    def share_extra_states(self) -> None:
        """Set the extra states of all replicas to rank 0's."""
        for replica in self._copies.values():
            copy_extra_states(replica.module, self._copy(0).module)

    def load_extra_states(self, saved: Sequence[Mapping[str, Any]]) -> list[str]:
        """Set the extra states of all replicas; return what could not be restored, in words."""
        left_out = load_extra_states(self._module, saved[0])
        if any(saved):
            for rank, of_rank in enumerate(saved):
                load_extra_states(self._copy(rank).module, of_rank)
        return left_out

    def _copy(self, rank: int) -> _Copy:
        if rank not in self._copies:
            self._copies[rank] = _Copy(self._module)
        return self._copies[rank]

    def _vectorised(self, parameters: Tensors, buffers: Tensors, inputs: Any, is_split: list[bool]) -> Any:
        leaves, spec = tree_flatten(inputs)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        spec_out: Any = None
        others: dict[int, Any] = {}  # the parts of the output that are not tensors, by place

        def call(own: Tensors, own_buffers: Tensors, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], Tensors]:
            nonlocal spec_out
            own_leaves = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                own_leaves[place] = tensor
            args, kwargs = tree_unflatten(own_leaves, spec)
            known = own | own_buffers
            # One mapping, because functional_call puts replaced buffers only into such a one; and with each place once,
            # because functional_call would not restore a module that occurs in two places.
            state = {name: known[first] for name, first in self._places.items()}
            output, spec_out = tree_flatten(functional_call(self._module, state, args, kwargs, tie_weights=False))
            others.update(_others(output))
            return [leaf for leaf in output if isinstance(leaf, torch.Tensor)], {name: state[name] for name in buffers}

        in_dims = (0, 0, *(0 if splits else None for splits in is_split))
        with (
            # A checkpoint would recompute, in the backward pass, with the parameters of the bare module.
            torch.autograd.graph.disable_saved_tensors_hooks("it uses activation checkpointing"),
            _constant_padding(self._module),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "There is a performance drop")  # still correct, and as fast as a loop
            found, state = vmap(call, in_dims, randomness="different")(
                parameters, buffers, *(leaves[place] for place in places)
            )
        _write_back(buffers, state)
        tensors = iter(found)
        output = [others[place] if place in others else next(tensors) for place in range(len(found) + len(others))]
        return tree_unflatten(output, spec_out)

    def _one_by_one(
        self, ranks: range, parameters: Tensors, buffers: Tensors, inputs: Any, is_split: list[bool]
    ) -> Any:
        leaves, spec = tree_flatten(inputs)
        # Not p[i], because the gradient of each would be a stack of zeros around it.
        rows = {name: stack.unbind() for name, stack in parameters.items()}
        found: list[list[Any]] = []
        spec_out: Any = None
        for number, rank in enumerate(ranks):
            for name, stack in rows.items():
                if stack[number].requires_grad:
                    stack[number].register_hook(functools.partial(self._on_row, name, rank))
            split = iter(is_split)
            own_leaves = [leaf[number] if isinstance(leaf, torch.Tensor) and next(split) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(own_leaves, spec)
            state = {name: stack[number] for name, stack in buffers.items()}
            output, spec_out = tree_flatten(
                self._copy(rank)({name: stack[number] for name, stack in rows.items()}, state, args, kwargs)
            )
            _others(output)
            found.append(output)
        stacked = [
            torch.stack(values) if isinstance(values[0], torch.Tensor) else values[0]
            for values in zip(*found, strict=True)
        ]
        return tree_unflatten(stacked, spec_out)

    def _on_row(self, name: str, rank: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # it is None for rows that were left out, if there are others
            self._on_gradient(name, rank)


class _Copy:
    """One replica's copy of a module, with given tensors in place of its parameters and buffers.

    They stay there after the call, because a checkpoint recomputes in the backward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        tensors = {id(tensor): (name, tensor) for name, tensor in (*named_parameters(module), *named_buffers(module))}
        self._source = list(module.modules())
        self.module = copy.deepcopy(module, {key: tensor for key, (_, tensor) in tensors.items()})
        self._modules = list(self.module.modules())
        self._homes = [
            (owned, key, tensors[id(tensor)][0])
            for own in self._modules
            for owned in cast(list[dict[str, Any]], [own_parameters(own), own_buffers(own)])
            for key, tensor in owned.items()
            if tensor is not None
        ]

    def __call__(self, parameters: Tensors, buffers: Tensors, args: Any, kwargs: Any) -> Any:
        for source, own in zip(self._source, self._modules, strict=True):
            if own.training is not source.training:
                own.training = source.training
        tensors: dict[str, Any] = parameters | buffers
        for owned, key, name in self._homes:
            owned[key] = tensors[name]
        output = self.module(*args, **kwargs)
        _write_back(buffers, {name: owned[key] for owned, key, name in self._homes if name in buffers})
        return output


def _others(output: Sequence[Any]) -> dict[int, Any]:
    """Return the parts of an output that are not tensors, by place.

    Raises TypeError: a part contains tensors that cannot be joined.
    """
    others = {place: leaf for place, leaf in enumerate(output) if not isinstance(leaf, torch.Tensor)}
    for leaf in others.values():
        if next(tensors_in(leaf), None) is not None:
            raise TypeError(
                f"the module's output has a {type(leaf).__name__} with tensors inside, which cannot be gathered from "
                "the replicas; return tensors in tuples, lists and dicts"
            )
    return others


@contextlib.contextmanager
def _constant_padding(module: nn.Module) -> Iterator[None]:
    """Keep gradients away from embeddings' padding vectors, which vmap does only for the first replica (torch 2.13)."""

    def detach(embedding: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        is_padding = torch.eq(args[0], cast(int, embedding.padding_idx))
        return torch.where(is_padding[..., None], output.detach(), output)

    with contextlib.ExitStack() as hooks:
        for part in module.modules():
            if isinstance(part, nn.Embedding) and part.padding_idx is not None:
                hooks.enter_context(part.register_forward_hook(detach, prepend=True))
        yield


def _forget_tensors(attributes: Sequence[tuple[nn.Module, dict[str, Any]]]) -> None:
    """Remove tensors that modules set as attributes (``self.hidden = ...``); those of a vmap are invalid outside."""
    for part, before in attributes:
        for key, value in list(vars(part).items()):
            if isinstance(value, torch.Tensor) and before.get(key) is not value:
                vars(part).pop(key)
                vars(part).update({key: before[key]} if key in before else {})


@torch.no_grad()
def _write_back(buffers: Tensors, state: Tensors) -> None:
    """Copy back buffers that the module replaced instead of writing in place."""
    for name, values in state.items():
        if values.data_ptr() != buffers[name].data_ptr():
            buffers[name].copy_(values)


@dataclass(frozen=True)
class Part:
    """The ranks from ``first`` to ``stop``, each with ``num_each`` samples of a batch, from its place ``begin`` on."""

    first: int
    stop: int
    begin: int
    num_each: int


def divide(num_samples: int, world_size: int) -> tuple[Part, ...]:
    """Distribute samples to ranks in order, equally, with one extra sample for each of the first ranks if needed.

    With fewer samples than ranks the last ranks get none, and belong to no part.

    Examples
    --------
    >>> divide(5, 3)
    (Part(first=0, stop=2, begin=0, num_each=2), Part(first=2, stop=3, begin=4, num_each=1))
    """
    share, rest = divmod(num_samples, world_size)
    parts = (Part(0, rest, 0, share + 1), Part(rest, world_size, rest * (share + 1), share))
    return tuple(part for part in parts if part.stop > part.first and part.num_each > 0)


def count_samples(inputs: Any, dim: int) -> int:
    """Return the length along ``dim`` of all tensors within ``inputs`` that have this dimension.

    Raises ValueError: the lengths differ, no tensor has the dimension, or there is no sample.
    """
    lengths = {leaf.shape[dim] for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim() > dim}
    if not lengths:
        raise ValueError(
            f"the inputs have no tensor with a dimension dim={dim} to split over the replicas; pass a batch, or "
            "construct VirtualWorkers with another dim"
        )
    if len(lengths) > 1:
        raise ValueError(
            f"the inputs' tensors have different lengths {sorted(lengths)} along dim={dim}, and cannot be split "
            "equally over the replicas; give all the same batch dimension (expand what is equal for all samples)"
        )
    (length,) = lengths
    if length == 0:
        raise ValueError(f"the inputs have no sample: length 0 along dim={dim}; pass at least one")
    return length


def scatter(inputs: Any, part: Part | None, ranks: range, dim: int, device: torch.device) -> tuple[Any, list[bool]]:
    """Return what some ranks of a part receive: tensors [k, ...] with ``num_each`` samples along ``dim`` of the rest.

    Tensors without that dimension, and anything else, are passed to all of them unchanged; without a part, everything.
    Also returned is for each tensor whether it has the leading dimension of replicas.
    """
    is_split: list[bool] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        is_split.append(part is not None and leaf.dim() > dim)
        if part is None or not is_split[-1]:
            return leaf.to(device)
        begin = part.begin + (ranks.start - part.first) * part.num_each
        own = leaf.narrow(dim, begin, len(ranks) * part.num_each).to(device)
        return own.unflatten(dim, (len(ranks), part.num_each)).movedim(dim, 0)

    return tree_map(take, inputs), is_split


def gather(outputs: Sequence[Any], dim: int | None, device: torch.device) -> Any:
    """Join the outputs of groups of replicas, [k, ...] each, along ``dim`` of the rest, or to one entry per replica."""

    def join(*leaves: Any) -> Any:
        if not isinstance(leaves[0], torch.Tensor):
            return leaves[0]
        rows = [leaf.to(device) for leaf in leaves]
        if dim is None or rows[0].dim() <= dim + 1:
            return torch.cat(rows)
        return torch.cat([row.movedim(0, dim).flatten(dim, dim + 1) for row in rows], dim)

    return tree_map(join, *outputs)
