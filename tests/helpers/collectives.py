"""Which collectives of all ranks a piece of code calls."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist

COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier"),
    *("broadcast", "broadcast_object_list", "gather", "reduce"),
)


@contextlib.contextmanager
def collectives_counted(called: list[str]) -> Iterator[list[str]]:
    """Within the block the names of the default group's collectives of torch.distributed are added to ``called``."""

    def counting(name: str) -> Callable[..., Any]:
        function = getattr(dist, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("group") in (None, dist.group.WORLD):
                called.append(name)
            return function(*args, **kwargs)

        return count

    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, counting(name)))
        yield called
