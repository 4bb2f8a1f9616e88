"""The hooks by which a model learns that parameters have their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.utils.hooks import RemovableHandle

from gossip.step.rank_exchanges import AnyBucket

GradientHook = Callable[[torch.Tensor], None]


class GradientHooks:
    """One for every parameter that is in a bucket.

    Parameters
    ----------
    make_hook : callable
        Makes the hook of a parameter from its bucket's index and its place in the bucket.
    """

    def __init__(self, make_hook: Callable[[int, int], GradientHook]) -> None:
        self._make_hook = make_hook
        self._handles: dict[tuple[int, int], RemovableHandle] = {}

    def add(self, buckets: Iterable[AnyBucket]) -> None:
        """Give a hook to all parameters of these buckets."""
        for bucket in buckets:
            for place, parameter in enumerate(bucket.parameters):
                requires_grad = parameter.requires_grad  # not if a checkpoint says that it is exchanged
                parameter.requires_grad_(True)
                hook = self._make_hook(bucket.index, place)
                self._handles[bucket.index, place] = parameter.register_post_accumulate_grad_hook(hook)
                parameter.requires_grad_(requires_grad)

    def are_followed(self, parameter: torch.Tensor, index: int, place: int) -> bool:
        """Whether hooks that were registered later are still to be called for the gradient that has just come."""
        hooks = parameter._post_accumulate_grad_hooks
        return bool(next(reversed(hooks)) != self._handles[index, place].id)

    def close(self) -> None:
        """Remove them. Local."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
