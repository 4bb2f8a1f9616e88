"""The hooks by which a model learns that the gradients of its parameters are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.utils.hooks import RemovableHandle

from gossip.exchange.rank_exchanges import AnyBucket

GradientHook = Callable[[torch.Tensor], None]


class GradientHooks:
    """One hook for every parameter that is in a bucket."""

    def __init__(self, make_hook: Callable[[int, int], GradientHook]) -> None:
        self._make_hook = make_hook
        self._handles: dict[tuple[int, int], RemovableHandle] = {}

    def add(self, buckets: Iterable[AnyBucket]) -> None:
        """Register hooks for all parameters of these buckets."""
        for bucket in buckets:
            for place, parameter in enumerate(bucket.parameters):
                requires_grad = parameter.requires_grad  # False if only a checkpoint requires it to be exchanged
                parameter.requires_grad_(True)
                hook = self._make_hook(bucket.index, place)
                self._handles[bucket.index, place] = parameter.register_post_accumulate_grad_hook(hook)
                parameter.requires_grad_(requires_grad)

    def are_followed(self, parameter: torch.Tensor, index: int, place: int) -> bool:
        """Return whether hooks that were registered later are still to be called for the newest gradient."""
        hooks = parameter._post_accumulate_grad_hooks
        return bool(next(reversed(hooks)) != self._handles[index, place].id)

    def close(self) -> None:
        """Remove the hooks. Local."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
