"""Parameters fused into flat blocks that are updated and exchanged as one message."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gossip.compression.codec import BucketShape
from gossip.errors import GossipError

MIXABLE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, eq=False)
class Bucket:
    """Some parameters of one dtype and device as views of one flat block.

    Attributes
    ----------
    index : int
        Its place in the order in which all ranks launch their buckets.
    names : tuple of str
    parameters : tuple of Parameter
        Their ``data`` are views of ``block``, with the strides that they came with.
    trainable : bool
        Whether they required a gradient when the bucket was made.
    block : Tensor, [numel]
        The values, padded with zeros so that every parameter starts at a multiple of 16 bytes.
    """

    index: int
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    trainable: bool
    block: torch.Tensor
    _homes: tuple[torch.Tensor, ...]
    _addresses: list[int]

    @cached_property
    def places(self) -> frozenset[int]:
        """The indices of its parameters."""
        return frozenset(range(len(self.parameters)))

    @property
    def shape(self) -> BucketShape:
        """What a codec may know of it."""
        views = [(tuple(home.shape), home.stride(), int(home.storage_offset())) for home in self._homes]
        return BucketShape(self.index, self.block, views)

    @torch.no_grad()
    def reclaim(self) -> None:
        """Bring back the values of parameters whose data were replaced (``p.data = ...``, a parametrization's write).

        Raises
        ------
        GossipError
            The new data are of another dtype, device or shape; names the parameter, which would be trained, but never
            mixed.
        """
        if list(map(torch.Tensor.data_ptr, self.parameters)) == self._addresses:
            return
        for name, parameter, home in zip(self.names, self.parameters, self._homes, strict=True):
            if parameter.data_ptr() != home.data_ptr():
                self._bring_back(name, parameter, home)

    def _bring_back(self, name: str, parameter: nn.Parameter, home: torch.Tensor) -> None:
        values = parameter.data
        if parameter.dtype != home.dtype or parameter.device != home.device or parameter.shape != home.shape:
            raise GossipError(
                f"parameter {name!r} has left its bucket: it is now {describe_tensor(values)}, but was "
                f"{describe_tensor(home)} when the module was wrapped (module.to(), .half() or p.data = ...); convert "
                "before wrapping, and write values of the same kind"
            )
        home.copy_(values)
        parameter.data = home

    def release(self) -> None:
        """Give every parameter memory of its own: saving one must not save the block, now that nothing is fused."""
        for parameter, address in zip(self.parameters, self._addresses, strict=True):
            if parameter.data_ptr() == address:
                parameter.data = parameter.data.clone()

    @cached_property
    def padding(self) -> list[slice]:
        """Where the block holds no value of a parameter."""
        is_padding = torch.ones(self.block.numel() + 2, dtype=torch.int8)
        is_padding[0] = is_padding[-1] = 0
        for view in self.views(is_padding[1:-1]):
            view.fill_(0)
        changes = is_padding.diff().nonzero().flatten().tolist()
        return [slice(start, stop) for start, stop in zip(changes[::2], changes[1::2], strict=True)]

    @torch.no_grad()
    def written(self) -> None:
        """Tell autograd that the block was written: views made through ``.data`` do not see it by themselves.

        What lies between the parameters is set to zero again: a compression may have made something of it, and it is in
        no checkpoint.
        """
        for gap in self.padding:
            self.block[gap] = 0
        torch.autograd.graph.increment_version(self.parameters)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A tensor of the block's size as one view per parameter, in its shape and strides."""
        start = flat.storage_offset()
        return [flat.as_strided(home.shape, home.stride(), start + home.storage_offset()) for home in self._homes]

    def describe(self) -> str:
        """One line: dtype, device, size and what is inside."""
        kind = "trainable" if self.trainable else "frozen"
        dtype = str(self.block.dtype).removeprefix("torch.")
        return f"{kind} {dtype} {self.block.device.type} {self.block.numel()}: {' '.join(self.names)}"


def make_buckets(parameters: Iterable[tuple[str, nn.Parameter]], cap_bytes: int) -> tuple[Bucket, ...]:
    """Move ``parameters`` into the blocks of buckets.

    Buckets are filled in reverse order of registration, which is about the order in which gradients arrive,
    separately per dtype and device, and apart for frozen parameters, whose buckets come last. A parameter larger than
    ``cap_bytes`` gets a bucket of its own.

    Parameters
    ----------
    parameters : iterable of (str, Parameter)
        Floating point, without overlap in memory; each one's ``data`` is replaced.
    cap_bytes : int
        What a bucket may hold.

    Returns
    -------
    tuple of Bucket
        In launch order.
    """
    plan: list[list[tuple[str, nn.Parameter]]] = []
    last_position: list[int] = []
    open_buckets: dict[tuple[bool, torch.dtype, torch.device], tuple[int, int]] = {}
    for position, (name, parameter) in enumerate(reversed(list(parameters))):
        key = (parameter.requires_grad, parameter.dtype, parameter.device)
        size = _slot_numel(parameter) * parameter.dtype.itemsize
        bucket, filled = open_buckets.get(key, (-1, cap_bytes))
        if bucket < 0 or filled + size > cap_bytes:
            bucket, filled = len(plan), 0
            plan.append([])
            last_position.append(position)
        plan[bucket].append((name, parameter))
        last_position[bucket] = position
        open_buckets[key] = (bucket, filled + size)

    order = sorted(range(len(plan)), key=lambda i: (not plan[i][0][1].requires_grad, last_position[i]))
    return tuple(_make_bucket(index, plan[i]) for index, i in enumerate(order))


def check_parameters(module: nn.Module) -> None:
    """Refuse what cannot live in a bucket or be averaged, by name and with the reason.

    Raises
    ------
    ValueError
        A lazy, meta, sparse, integer or complex parameter, a lazy or meta buffer, a tensor whose elements overlap, or
        two parameters that share memory.
    """
    for name, buffer in module.named_buffers():
        if refusal := _refusal(buffer):
            raise ValueError(f"buffer {name!r} {refusal}")
    spans: list[tuple[int, int, str]] = []
    for name, parameter in module.named_parameters():
        refusal = _refusal(parameter)
        if refusal is None and parameter.dtype not in MIXABLE_DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in MIXABLE_DTYPES)
            refusal = f"has the dtype {parameter.dtype}; only {names} can be mixed: convert it, or make it a buffer"
        if refusal is not None:
            raise ValueError(f"parameter {name!r} {refusal}")
        if parameter.numel():
            start = parameter.data_ptr()
            spans.append((start, start + _span(parameter) * parameter.dtype.itemsize, name))
    spans.sort()
    for (_, end, name), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise ValueError(
                f"parameters {name!r} and {other!r} are two Parameters over the same memory; to tie them let both "
                "names hold one Parameter, else clone one of them"
            )


def _refusal(tensor: torch.Tensor) -> str | None:
    if is_lazy(tensor):
        return "is lazy; run one forward before wrapping the module"
    if tensor.is_meta:
        return "is on the meta device; materialise the module (module.to_empty(device=...)) before wrapping it"
    if type(tensor.data) is not torch.Tensor:
        return f"holds a {type(tensor.data).__name__}; only plain dense tensors can be used"
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}; only dense tensors can be used"
    if _overlaps_itself(tensor):
        return f"overlaps itself in memory (strides {tensor.stride()}); clone it before wrapping the module"
    return None


def _make_bucket(index: int, entries: Sequence[tuple[str, nn.Parameter]]) -> Bucket:
    first = entries[0][1]
    numel = sum(_slot_numel(parameter) for _, parameter in entries)
    block = torch.zeros(max(numel, 1), dtype=first.dtype, device=first.device)
    homes = []
    offset = 0
    for _, parameter in entries:
        home = block[offset:].as_strided(parameter.shape, parameter.stride(), offset)
        home.copy_(parameter.data)
        parameter.data = home
        homes.append(parameter.data)
        offset += _slot_numel(parameter)
    return Bucket(
        index=index,
        names=tuple(name for name, _ in entries),
        parameters=tuple(parameter for _, parameter in entries),
        trainable=first.requires_grad,
        block=block,
        _homes=tuple(homes),
        _addresses=[home.data_ptr() for home in homes],
    )


def describe_tensor(tensor: torch.Tensor) -> str:
    """Dtype, shape and device in a few words."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"


def _span(tensor: torch.Tensor) -> int:
    """How many elements of memory lie between its first and its last, both included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _slot_numel(parameter: nn.Parameter) -> int:
    unit = max(1, _ALIGNMENT_BYTES // parameter.dtype.itemsize)
    return -(-_span(parameter) // unit) * unit


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
