"""How much memory tensors take while a test runs."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """The memory, on the CPU, of the tensors that this thread has made in the block and that are alive.

    Attributes
    ----------
    now, peak : int
        In bytes, at the newest operation, and the most so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        results = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(results):
            if storage._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: entry for key, entry in self._made.items() if not entry[0].expired()}
        self.now = sum(size for _, size in self._made.values())
        self.peak = max(self.peak, self.now)
        return results


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu")
    return [leaf.untyped_storage() for leaf in leaves]
