"""One module called with many replicas' parameters: vectorised where it can be, else one after the other."""

from __future__ import annotations

from typing import Any

import torch
from loguru import logger
from torch import nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

Tensors = dict[str, torch.Tensor]


class ReplicaCalls:
    """Calls ``module`` as each of k replicas.

    All at once by ``torch.func.vmap``, with randomness of each replica's own. What vmap cannot take (control flow that
    depends on the data, ``item()``) is found out by the first call that fails, and from then on run replica by replica.

    Attributes
    ----------
    is_vectorised : bool
        Whether calls are made by vmap.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.is_vectorised = True

    def __call__(self, parameters: Tensors, buffers: Tensors, inputs: Any, is_split: list[bool]) -> Any:
        """Outputs of all replicas.

        Parameters
        ----------
        parameters, buffers : mapping of str to Tensor, [k, *shape]
            Buffers are changed in place where the module changes its own.
        inputs : (tuple, dict)
            Of the call.
        is_split : list of bool
            For each of their tensors: whether it has a leading dimension of replicas, or is the same for all.

        Returns
        -------
        Any
            As the module's output, with tensors [k, ...].
        """
        if not self.is_vectorised:
            return self._one_by_one(parameters, buffers, inputs, is_split)
        saved = {name: buffer.clone() for name, buffer in buffers.items()} if self._module.training else {}
        random_state = torch.get_rng_state()
        try:
            return self._vectorised(parameters, buffers, inputs, is_split)
        except Exception as error:
            for name, values in saved.items():
                buffers[name].copy_(values)
            torch.set_rng_state(random_state)
            outputs = self._one_by_one(parameters, buffers, inputs, is_split)  # the user's own mistakes end here
            self.is_vectorised = False
            logger.warning(
                "{} cannot be vectorised over the replicas, which are run one after the other from now on: {}",
                type(self._module).__name__,
                " ".join(str(error).split())[:200],
            )
            return outputs

    def _vectorised(self, parameters: Tensors, buffers: Tensors, inputs: Any, is_split: list[bool]) -> Any:
        leaves, spec = tree_flatten(inputs)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        spec_out: Any = None
        others: dict[int, Any] = {}  # what of the output is no tensor, by place

        def call(own: Tensors, own_buffers: Tensors, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], Tensors]:
            nonlocal spec_out
            mine = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                mine[place] = tensor
            args, kwargs = tree_unflatten(mine, spec)
            state = dict(own_buffers)
            output, spec_out = tree_flatten(functional_call(self._module, (own, state), args, kwargs))
            others.update({place: leaf for place, leaf in enumerate(output) if not isinstance(leaf, torch.Tensor)})
            return [leaf for leaf in output if isinstance(leaf, torch.Tensor)], state

        in_dims = (0, 0, *(0 if each else None for each in is_split))
        found, state = vmap(call, in_dims, randomness="different")(
            dict(parameters), buffers, *(leaves[place] for place in places)
        )
        _write_back(buffers, state)
        tensors = iter(found)
        output = [others[place] if place in others else next(tensors) for place in range(len(found) + len(others))]
        return tree_unflatten(output, spec_out)

    def _one_by_one(self, parameters: Tensors, buffers: Tensors, inputs: Any, is_split: list[bool]) -> Any:
        leaves, spec = tree_flatten(inputs)
        num_replicas = len(next(iter({**parameters, **buffers}.values())))
        # Not p[i]: the gradient of each would be a stack of zeros around it.
        own = {name: stack.unbind() for name, stack in parameters.items()}
        found: list[list[Any]] = []
        spec_out: Any = None
        for number in range(num_replicas):
            split = iter(is_split)
            mine = [leaf[number] if isinstance(leaf, torch.Tensor) and next(split) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(mine, spec)
            state = {name: stack[number] for name, stack in buffers.items()}
            row = {name: each[number] for name, each in own.items()}
            output, spec_out = tree_flatten(functional_call(self._module, (row, state), args, kwargs))
            _write_back({name: stack[number] for name, stack in buffers.items()}, state)
            found.append(output)
        stacked = [
            torch.stack(each) if isinstance(each[0], torch.Tensor) else each[0] for each in zip(*found, strict=True)
        ]
        return tree_unflatten(stacked, spec_out)


@torch.no_grad()
def _write_back(buffers: Tensors, state: Tensors) -> None:
    """Take over buffers that the module replaced, rather than wrote in place."""
    for name, values in state.items():
        if values.data_ptr() != buffers[name].data_ptr():
            buffers[name].copy_(values)
