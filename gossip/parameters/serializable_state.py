"""The data that a checkpoint or a message can hold: what torch loads without running code (``weights_only=True``)."""

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils.dlpack import to_dlpack

from gossip.errors import reason
from gossip.private_torch import tree_map

_ALIGNMENT = 64  # in bytes, of each tensor's values
_TENSOR = "tensor"
_JSON = (type(None), bool, int, float, str)
# The other atoms, by name: the type, its conversion to JSON, and the conversion back.
_ATOMS: Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "complex": (complex, lambda value: [value.real, value.imag], lambda packed: complex(*packed)),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "size": (torch.Size, list, torch.Size),
    "dtype": (torch.dtype, lambda value: str(value).removeprefix("torch."), lambda packed: getattr(torch, packed)),
    "device": (torch.device, str, torch.device),
}
_CONTAINERS: Mapping[str, type[Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": Counter,
    "list": list,
    "tuple": tuple,
    "set": set,
}
_NAMES = {kind: name for name, kind in _CONTAINERS.items()} | {kind: name for name, (kind, *_) in _ATOMS.items()}


def to_serializable(value: Any, where: str) -> Any:
    """Return ``value`` with containers copied, tensors compacted and NumPy's numbers converted to Python's. Local.

    Raises TypeError: something cannot be saved; the text names its place.

    Parameters
    ----------
    value : object
        Numbers, strings, bytes, None, dtypes, devices, tensors, and lists, tuples, sets and dicts of those. They must
        have exactly these types, because a pickled subclass is refused on loading.
    where : str
        The name of the value, for the error text.
    """
    kind = type(value)
    if kind in _JSON or _NAMES.get(kind) in _ATOMS:
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if kind in (torch.Tensor, nn.Parameter):
        return compact(value, where)
    if kind in _NAMES and issubclass(kind, dict):
        items = {
            to_serializable(key, f"a key of {where}"): to_serializable(item, f"{where}[{key!r}]")
            for key, item in value.items()
        }
        return kind(items)
    if kind in _NAMES:
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

    Raises ValueError: it raised an exception; the text says which.
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
    """Return the tensor without the rest of the memory that it views, which torch would save along with it.

    It is copied only if its elements have gaps between them.
    """
    if tensor.is_meta or tensor.layout != torch.strided:
        raise TypeError(f"{where} is a tensor without values of its own (meta or sparse); give a dense one")
    tensor = tensor.detach()
    if tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size():
        return tensor
    if not (tensor.numel() and tensor.is_contiguous()) or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    return with_own_storage(tensor.view(-1).view(torch.uint8)).view(tensor.dtype).view(tensor.shape)


def copied(value: Any) -> Any:
    """Return what :func:`to_serializable` returned with copies of its tensors, on the CPU."""
    return tree_map(lambda leaf: leaf.to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf, value)


def with_own_storage(flat: torch.Tensor) -> torch.Tensor:
    """Return the same memory, which it keeps alive, as a tensor whose storage holds nothing else."""
    # The capsule, because the tensor's own __dlpack__ refuses all CUDA devices except the current one.
    return torch.from_dlpack(to_dlpack(flat))


def serialize(state: Any, allocate: Callable[[int], torch.Tensor] | None = None) -> tuple[str, torch.Tensor]:
    """Return what :func:`to_serializable` returned as text and tensor values. Local; copies each value once.

    ``allocate`` is called with their number before any bytes are copied, and returns so many zeros, uint8, on the CPU.

    Returns
    -------
    text : str
        The structure as JSON, with the place of each tensor.
    values : Tensor, [nbytes], uint8, on the CPU
        The bytes of the tensors.
    """
    tensors: dict[int, torch.Tensor] = {}  # by offset
    end = 0

    def pack(value: Any) -> Any:
        nonlocal end
        if type(value) in _JSON:
            return value
        if isinstance(value, torch.Tensor):
            offset, end = end, end + -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
            tensors[offset] = value
            return {_TENSOR: [offset, _ATOMS["dtype"][1](value.dtype), list(value.shape)]}
        name = _NAMES[type(value)]
        if name in _ATOMS:
            return {name: _ATOMS[name][1](value)}
        if isinstance(value, dict):
            return {name: [[pack(key), pack(item)] for key, item in value.items()]}
        return {name: [pack(item) for item in value]}

    text = json.dumps(pack(state))
    values = torch.zeros(end, dtype=torch.uint8) if allocate is None else allocate(end)
    for offset, tensor in tensors.items():
        _placed(values, offset, tensor.dtype, tensor.shape).copy_(tensor.detach())
    return text, values


def deserialize(text: str, values: torch.Tensor, release: Callable[[int], object] | None = None) -> Any:
    """Return what :func:`serialize` was given; its tensors are copies of what is in ``values``. Local.

    ``release`` is called with the end of what has been copied, each time that it moves.
    """

    def unpack(packed: Any) -> Any:
        if not isinstance(packed, dict):
            return packed
        ((name, content),) = packed.items()
        if name == _TENSOR:
            offset, dtype_name, shape = content
            dtype = _ATOMS["dtype"][2](dtype_name)
            tensor = _placed(values, offset, dtype, torch.Size(shape)).clone()
            if release is not None:
                release(offset + tensor.nbytes)
            return tensor
        if name in _ATOMS:
            return _ATOMS[name][2](content)
        kind = _CONTAINERS[name]
        return kind({unpack(k): unpack(v) for k, v in content} if issubclass(kind, dict) else map(unpack, content))

    return unpack(json.loads(text))


def _placed(values: torch.Tensor, offset: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return values[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
