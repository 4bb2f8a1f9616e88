"""The data that a checkpoint can hold: what torch loads with ``weights_only=True``, that is, without running code."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from gossip.errors import reason

_ATOMS = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device)
_MAPPINGS = (dict, OrderedDict, Counter)
_SEQUENCES = (list, tuple, set)


def to_serializable(value: Any, where: str) -> Any:
    """Return ``value`` with containers copied, tensors compacted and NumPy's numbers converted to Python's. Local.

    Parameters
    ----------
    value : object
        Numbers, strings, bytes, None, dtypes, devices, tensors, and lists, tuples, sets and dicts of those. They must
        have exactly these types, because a pickled subclass is refused on loading.
    where : str
        The name of the value, for the error text.

    Raises
    ------
    TypeError
        Something cannot be saved; the text names its place.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if kind in (torch.Tensor, nn.Parameter):
        return compact(value, where)
    if kind in _MAPPINGS:
        items = {
            to_serializable(key, f"a key of {where}"): to_serializable(item, f"{where}[{key!r}]")
            for key, item in value.items()
        }
        return kind(items)
    if kind in _SEQUENCES:
        return kind(to_serializable(item, f"{where}[{index}]") for index, item in enumerate(value))
    hint = "; torch.from_numpy makes a tensor of it" if kind is np.ndarray else ""
    raise TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: give numbers, strings, "
        "tensors, lists and dicts, or an object with state_dict() and load_state_dict() that return and take "
        f"those{hint}"
    )


class HasState(Protocol):
    """An object with a state."""

    def state_dict(self) -> dict[str, Any]: ...


def state_of(stateful: HasState, where: str) -> dict[str, Any]:
    """Return ``stateful.state_dict()``, which ``where`` names. Local.

    Raises
    ------
    ValueError
        It raised an exception; the text says which.
    """
    try:
        return stateful.state_dict()
    except Exception as error:
        raise ValueError(f"{where} failed: {reason(error)}") from error


def is_serializable(value: Any) -> bool:
    """Return whether :func:`to_serializable` would return a value."""
    try:
        to_serializable(value, "it")
    except Exception:
        return False
    return True


def compact(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """Return the tensor without the rest of the memory that it views, which torch would save along with it."""
    if tensor.is_meta or tensor.layout != torch.strided:
        raise TypeError(f"{where} is a tensor without values of its own (meta or sparse); give a dense one")
    tensor = tensor.detach()
    is_view = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.clone() if is_view else tensor
