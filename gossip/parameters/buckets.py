"""Parameters fused into flat blocks that are updated and exchanged as one message."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gossip.compression.codec import BucketShape, View, gaps
from gossip.errors import GossipError, warn_user
from gossip.parameters.names import in_words, named_buffers, named_parameters
from gossip.parameters.serializable_state import with_own_storage

MIXABLE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Parameters of other dtypes, such as quantized weights, can only be frozen: averages keep rank 0's."""
_UNMIXABLE = "has the dtype {}; only float64, float32, bfloat16 and float16 can be mixed"
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters of one dtype and device, contiguous in the memory of one flat block.

    Attributes
    ----------
    index : int
        The bucket's place in the order in which all ranks launch their buckets.
    names : tuple of str
        The parameters' names.
    parameters : tuple of Parameter
        Their ``data`` lie in the block's memory, with their original strides. Each has a storage object of its own,
        over its part alone, because code that saves or compares whole storages (``torch.save``, safetensors,
        accelerate) would otherwise take the whole block for one tensor.
    block : Tensor, [numel]
        The values, padded with zeros so that every parameter starts at a multiple of 16 bytes.
    """

    index: int
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    block: torch.Tensor
    _slots: tuple[View, ...]
    _addresses: list[int]
    _shared_names: list[str]

    @cached_property
    def places(self) -> frozenset[int]:
        """The indices of the parameters."""
        return frozenset(range(len(self.parameters)))

    @property
    def shape(self) -> BucketShape:
        """What a codec knows about the bucket."""
        return BucketShape(self.index, self.block, self._slots)

    @torch.no_grad()
    def reclaim(self) -> None:
        """Copy back the values of parameters whose data were replaced (``p.data = ...``, a parametrization's write).

        Raises GossipError: the new data have another dtype, device or shape, so the parameter would be trained but
        never mixed; the text names it.
        """
        addresses = list(map(torch.Tensor.data_ptr, self.parameters))
        if addresses == self._addresses:
            return
        for number, (address, home) in enumerate(zip(addresses, self._addresses, strict=True)):
            if address != home:
                self._bring_back(self.names[number], self.parameters[number], self._slots[number])

    def _bring_back(self, name: str, parameter: nn.Parameter, slot: View) -> None:
        values, home = parameter.data, _home(self.block, slot)
        if parameter.dtype != home.dtype or parameter.device != home.device or parameter.shape != home.shape:
            raise GossipError(
                f"parameter {name!r} has left its bucket: it is now {describe_tensor(values)}, but was "
                f"{describe_tensor(home)} when the module was wrapped (module.to(), .half() or p.data = ...); convert "
                "the module before wrapping it, and write values of the same dtype, device and shape"
            )
        if values.is_cpu and values.is_shared():
            if not self._shared_names:  # of all buckets: whoever sends parameters sends all of them, again and again
                warn_user(
                    f"parameter {name!r} was put into shared memory (share_memory_(), or sent to another process): it "
                    "continues in its bucket, and other processes keep seeing its present values; send it again when "
                    "it has changed"
                )
            self._shared_names.append(name)
        home.copy_(values)
        parameter.data = home

    def release(self) -> None:
        """Give every parameter memory of its own, so that keeping one does not keep the whole block."""
        for parameter, address in zip(self.parameters, self._addresses, strict=True):
            if parameter.data_ptr() == address:
                parameter.data = parameter.data.clone()

    @cached_property
    def padding(self) -> list[slice]:
        """The ranges of the block that hold no value of a parameter."""
        return gaps(self.block.numel(), self._slots)

    @torch.no_grad()
    def written(self) -> None:
        """Tell autograd that the block was written, which views made through ``.data`` do not notice by themselves.

        The gaps between the parameters are set to zero again: a compression may have written to them, and no checkpoint
        contains them.
        """
        for gap in self.padding:
            self.block[gap] = 0
        torch.autograd.graph.increment_version(self.parameters)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a tensor like the block, [..., numel], as one view per parameter, [..., *shape], in its strides."""
        start, rows, steps = flat.storage_offset(), tuple(flat.shape[:-1]), flat.stride()[:-1]
        return [flat.as_strided(rows + shape, steps + stride, start + at) for shape, stride, at in self._slots]


def make_buckets(
    parameters: Iterable[tuple[str, nn.Parameter]],
    cap_bytes: int,
    first_index: int = 0,
    numels: Mapping[str, int] = MappingProxyType({}),
) -> tuple[Bucket, ...]:
    """Move floating point parameters that do not overlap in memory into the blocks of buckets, in launch order.

    Buckets are filled in reverse order of registration, which is about the order in which gradients arrive, separately
    per dtype and device. A parameter larger than ``cap_bytes`` gets a bucket of its own. ``numels`` are those by which
    buckets are filled where other ranks have more or less of a parameter.
    """
    plan: list[list[tuple[str, nn.Parameter]]] = []
    last_position: list[int] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[int, int]] = {}
    for position, (name, parameter) in enumerate(reversed(list(parameters))):
        key = (parameter.dtype, parameter.device)
        size = numels.get(name, _slot_numel(parameter)) * parameter.dtype.itemsize
        bucket, filled = open_buckets.get(key, (-1, cap_bytes))
        if bucket < 0 or filled + size > cap_bytes:
            bucket, filled = len(plan), 0
            plan.append([])
            last_position.append(position)
        plan[bucket].append((name, parameter))
        last_position[bucket] = position
        open_buckets[key] = (bucket, filled + size)

    order = sorted(range(len(plan)), key=last_position.__getitem__)
    shared_names: list[str] = []
    return tuple(_make_bucket(index, plan[i], shared_names) for index, i in enumerate(order, first_index))


def check_parameters(module: nn.Module) -> None:
    """Refuse tensors that cannot be in a bucket or be averaged, by name and with the reason.

    Raises ValueError: a lazy, meta or sparse parameter, one that requires a gradient and is complex or float8, a lazy
    or meta buffer, a tensor whose elements overlap or that was made in inference mode, or two parameters that share
    memory.
    """
    for name, buffer in named_buffers(module):
        if refusal := _refusal(buffer):
            raise ValueError(f"buffer {name!r} {refusal}")
    spans: list[tuple[int, int, str]] = []
    for name, parameter in named_parameters(module):
        refusal = _refusal(parameter)
        if refusal is None and parameter.requires_grad and not is_mixable(parameter):
            refusal = f"{_UNMIXABLE.format(parameter.dtype)}: convert it, or freeze it"
        if refusal is not None:
            raise ValueError(f"parameter {name!r} {refusal}")
        if parameter.numel():
            start = parameter.data_ptr()
            spans.append((start, start + _span(parameter.shape, parameter.stride()) * parameter.dtype.itemsize, name))
    spans.sort()
    for (_, end, name), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise ValueError(
                f"parameters {name!r} and {other!r} are two Parameters over the same memory; to tie them, use a single "
                "Parameter under both names, otherwise clone one of them"
            )


def check_dense(module: nn.Module, why: str) -> None:
    """Refuse, by ValueError, parts that give sparse gradients to parameters that are trained."""
    for name, part in module.named_modules():
        is_trained = any(parameter.requires_grad for parameter in part.parameters(recurse=False))
        if getattr(part, "sparse", False) is True and is_trained:
            raise ValueError(f"{in_words(name)} has sparse=True, {why}; build it with sparse=False")


def is_mixable(parameter: torch.Tensor) -> bool:
    """Return whether ranks can mix the values; a parameter of another dtype can only be frozen."""
    return parameter.dtype in MIXABLE_DTYPES


def check_unfrozen(parameters: Mapping[str, torch.Tensor]) -> None:
    """Refuse, by GossipError, a parameter that is to be exchanged from now on, but that cannot be mixed."""
    for name, parameter in parameters.items():
        if not is_mixable(parameter):
            raise GossipError(
                f"parameter {name!r} was unfrozen, but {_UNMIXABLE.format(parameter.dtype)}; leave it frozen, or "
                "close() the model, convert it and wrap the module again"
            )


def _refusal(tensor: torch.Tensor) -> str | None:
    if is_lazy(tensor):
        return "is lazy; run one forward before wrapping the module"
    if tensor.is_meta:
        return "is on the meta device; materialise the module (module.to_empty(device=...)) before wrapping it"
    if tensor.is_inference():
        return (
            "was made under torch.inference_mode(), so it can never be trained; make the module outside of that mode, "
            "or wrap a copy.deepcopy(module) made outside of it"
        )
    if type(tensor.data) is not torch.Tensor:
        return f"holds a {type(tensor.data).__name__}; only plain dense tensors can be used"
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}; only dense tensors can be used"
    if _overlaps_itself(tensor):
        return f"overlaps itself in memory (strides {tensor.stride()}); clone it before wrapping the module"
    return None


def _make_bucket(index: int, entries: Sequence[tuple[str, nn.Parameter]], shared_names: list[str]) -> Bucket:
    first = entries[0][1]
    numel = sum(_slot_numel(parameter) for _, parameter in entries)
    block = torch.zeros(max(numel, 1), dtype=first.dtype, device=first.device)
    slots: list[View] = []
    offset = 0
    for _, parameter in entries:
        slots.append((tuple(parameter.shape), parameter.stride(), offset))
        home = _home(block, slots[-1])
        home.copy_(parameter.data)
        parameter.data = home
        offset += _slot_numel(parameter)
    return Bucket(
        index=index,
        names=tuple(name for name, _ in entries),
        parameters=tuple(parameter for _, parameter in entries),
        block=block,
        _slots=tuple(slots),
        _addresses=[parameter.data_ptr() for _, parameter in entries],
        _shared_names=shared_names,
    )


def _home(block: torch.Tensor, slot: View) -> torch.Tensor:
    """Return a parameter's part of the block: the same memory, which it keeps alive, as a storage of its own."""
    shape, stride, offset = slot
    return with_own_storage(block[offset : offset + _span(shape, stride)]).as_strided(shape, stride)


def describe_tensor(tensor: torch.Tensor) -> str:
    """Describe dtype, shape and device in a few words."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements of memory a tensor spans, from its first element to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _slot_numel(parameter: nn.Parameter) -> int:
    return aligned_numel(_span(parameter.shape, parameter.stride()), parameter.dtype)


def aligned_numel(numel: int, dtype: torch.dtype) -> int:
    """Return how many elements of a block a parameter takes that spans ``numel``."""
    unit = max(1, _ALIGNMENT_BYTES // dtype.itemsize)
    return -(-numel // unit) * unit


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
