"""Plain data as text and a single row of bytes, to be sent to another process; nothing is ever unpickled."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

_ALIGNMENT = 64  # in bytes, of each tensor's values
_TENSOR = "tensor"

# By name: the type, its conversion to JSON, and the conversion back.
_ATOMS: Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "complex": (complex, lambda value: [value.real, value.imag], lambda packed: complex(*packed)),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "size": (torch.Size, list, torch.Size),
    "dtype": (torch.dtype, lambda value: str(value).removeprefix("torch."), lambda packed: getattr(torch, packed)),
    "device": (torch.device, str, torch.device),
}
_MAPPINGS: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set}
_NAMES = {kind: name for name, kind in (_MAPPINGS | _SEQUENCES).items()} | {
    kind: name for name, (kind, _, _) in _ATOMS.items()
}


def serialize(state: Any) -> tuple[str, torch.Tensor]:
    """Return what ``serializable_state.to_serializable`` returned as text and tensor values. Local; copies.

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
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, torch.Tensor):
            offset, end = end, end + -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
            tensors[offset] = value
            return {_TENSOR: [offset, _ATOMS["dtype"][1](value.dtype), list(value.shape)]}
        name = _NAMES[type(value)]
        if name in _ATOMS:
            return {name: _ATOMS[name][1](value)}
        if name in _MAPPINGS:
            return {name: [[pack(key), pack(item)] for key, item in value.items()]}
        return {name: [pack(item) for item in value]}

    text = json.dumps(pack(state))
    values = torch.zeros(end, dtype=torch.uint8)
    for offset, tensor in tensors.items():
        if tensor.numel():
            values[offset : offset + tensor.nbytes].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
    return text, values


def deserialize(text: str, values: torch.Tensor) -> Any:
    """Return what :func:`serialize` was given; its tensors are views of ``values``. Local."""

    def unpack(packed: Any) -> Any:
        if not isinstance(packed, dict):
            return packed
        ((name, content),) = packed.items()
        if name == _TENSOR:
            offset, dtype_name, shape = content
            dtype = _ATOMS["dtype"][2](dtype_name)
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            return values[offset : offset + nbytes].view(dtype).view(shape)
        if name in _ATOMS:
            return _ATOMS[name][2](content)
        if name in _MAPPINGS:
            return _MAPPINGS[name]({unpack(key): unpack(item) for key, item in content})
        return _SEQUENCES[name](map(unpack, content))

    return unpack(json.loads(text))
