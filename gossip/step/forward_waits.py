"""Which modules read which parameters, and where a forward pass must wait for messages.

Used by algorithms that combine before the next forward pass.
"""

import functools
import os.path
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gossip.parameters.buckets import Bucket
from gossip.private_torch import is_compiled, tree_leaves

Users = Mapping[int, set[str]]
"""The names of the modules that read a parameter, by the parameter's id."""


class UserRecorder(TorchFunctionMode):
    """Records during one forward pass which module is running whenever a parameter is used.

    A parameter need not be used by the module that owns it: ``nn.MultiheadAttention`` reads its ``out_proj`` without
    calling it, and a tied output layer is read by whichever module computes the logits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._running = [""]
        self.users: dict[int, set[str]] = {}

    @contextmanager
    def watch(self, module: nn.Module) -> Iterator[None]:
        """Record within the block, in which ``module`` is called."""
        with ExitStack() as hooks:
            for name, part in module.named_modules():
                if isinstance(part, torch.jit.ScriptModule):
                    continue  # takes no hooks, and has no parameters of its own
                enter = part.register_forward_pre_hook(lambda *_, name=name: self._running.append(name))
                hooks.enter_context(enter)
                hooks.enter_context(part.register_forward_hook(self._leave, always_call=True))
            with self:
                yield

    def _leave(self, *_: Any) -> None:
        self._running.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Reading a shape or a device does not use the values.
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter):
                    self.users.setdefault(id(leaf), set()).add(self._running[-1])
        return result


class AwaitHook:
    """A forward pre-hook that first combines some buckets; in a copied or unpickled module it does nothing."""

    def __init__(self, combine: Callable[[Sequence[int]], None] | None, buckets: Sequence[int] = ()) -> None:
        self._combine = combine
        self._buckets = list(buckets)

    def __call__(self, *_: Any) -> None:
        if self._combine is not None:
            self._combine(self._buckets)

    def __reduce__(self) -> tuple[Any, ...]:
        return AwaitHook, (None,)


class ForwardWaits:
    """The modules whose forward passes first combine buckets.

    A bucket is awaited by the lowest module whose subtree contains every user of its parameters, and by the modules
    inside that subtree that contain some of them, in case one is called directly. Until a forward pass has shown the
    users, and for a parameter that it did not use, this is the whole module. It remains the whole module if parts are
    compiled, because these cannot be watched. The module's ``state_dict()`` combines all buckets.
    """

    def __init__(self, module: nn.Module, buckets: Sequence[Any], combine: Callable[[Sequence[int]], None]) -> None:
        self._module = module
        self._buckets = buckets
        self._combine = combine
        self._is_settled = not buckets
        self._hooks, self._of_state_dict = ExitStack(), ExitStack()
        if buckets:
            hook = AwaitHook(combine, [bucket.index for bucket in buckets])
            self._of_state_dict.enter_context(module.register_state_dict_pre_hook(hook))
            self._place(None)

    def watched(self, module: Callable[..., Any]) -> Callable[..., Any]:
        """Return what calls the module; its first forward pass that trains shows who reads which parameters."""
        if self._is_settled or not torch.is_grad_enabled():
            return module
        return functools.partial(self.call_watched, module)

    def call_watched(self, module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the module uncompiled, and from now on let its parts wait for what they read."""
        self._is_settled = True
        if any(is_compiled(part) for part in self._module.modules()):
            return module(*args, **kwargs)
        recorder = UserRecorder()
        with recorder.watch(self._module):
            output = module(*args, **kwargs)
        self._place(recorder.users)
        return output

    def close(self) -> None:
        """Remove the hooks. Local."""
        self._hooks.close()
        self._of_state_dict.close()

    def _place(self, users: Users | None) -> None:
        self._hooks.close()
        modules = dict(self._module.named_modules())
        awaited: dict[str, list[int]] = {}
        for bucket in self._buckets:
            top = _lowest_common_module(bucket, users)
            for name in {top, *_owners_and_above(bucket, top)}:
                if name in modules:
                    awaited.setdefault(name, []).append(bucket.index)
        for name, indices in awaited.items():
            hook = AwaitHook(self._combine, indices)
            self._hooks.enter_context(modules[name].register_forward_pre_hook(hook, prepend=True))


def _lowest_common_module(bucket: Any, users: Users | None) -> str:
    if users is None or not isinstance(bucket, Bucket):
        return ""
    readers = set[str]().union(*(users.get(id(parameter), {""}) for parameter in bucket.parameters))
    return os.path.commonpath([f"/{name.replace('.', '/')}" for name in readers]).strip("/").replace("/", ".")


def _owners_and_above(bucket: Any, top: str) -> Iterator[str]:
    """Yield the modules on the way from ``top`` down to the owners of the bucket's tensors."""
    for name in bucket.names:
        parts = name.split(".")[:-1]
        for end in range(len(parts), -1, -1):
            path = ".".join(parts[:end])
            if path == top or (top and not path.startswith(f"{top}.")):
                break
            yield path
