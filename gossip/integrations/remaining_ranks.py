"""The collective operations of torch's default group, in which a library includes lost ranks, by the ranks that remain.

Libraries call ``torch.distributed.barrier`` and its like wherever they log, evaluate and save. With gloo such a call
fails once a rank is lost. While a :class:`RemainingRanks` is installed, those on the default group are carried out in
the world of the model that trains, or, before and after it, in a world of all ranks of its own.
"""

import functools
import inspect
import io
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gossip import GossipDataParallel, GossipError
from gossip.communication import training_store
from gossip.elastic.elastic_world import ElasticWorld
from gossip.errors import reason
from gossip.wrapper import DEFAULT_TIMEOUT

_REDUCTIONS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: lambda rows: rows.sum(0, dtype=rows.dtype),
    dist.ReduceOp.AVG: lambda rows: rows.sum(0, dtype=rows.dtype) / len(rows),
    dist.ReduceOp.MIN: lambda rows: rows.amin(0),
    dist.ReduceOp.MAX: lambda rows: rows.amax(0),
    dist.ReduceOp.PRODUCT: lambda rows: rows.prod(0),
}


class RemainingRanks:
    """The ranks that a library sees: numbered from 0, without those that are lost.

    Construction is collective. ``on_change(rank, world_size)`` is called when ranks have been lost, on every remaining
    rank before it makes the next step or operation.
    """

    def __init__(self, options: Mapping[str, Any], on_change: Callable[[int, int], object]) -> None:
        timeout, min_ranks = options.get("timeout", DEFAULT_TIMEOUT), options.get("min_ranks")
        self._world = ElasticWorld(timeout, dist.group.WORLD, min_ranks=min_ranks, is_in_step=False)
        self._members = self._world.members
        self._num_initial = len(self._members)
        self._model: Callable[[], GossipDataParallel | None] = lambda: None
        self._on_change = on_change
        self._installed = ExitStack()
        self._world.on_enter = self._renumber

    def use(self, model: GossipDataParallel) -> None:
        """Operate in the world of this model until it is closed. Local, on all ranks."""
        self._model = weakref.ref(model)
        assert isinstance(model.world, ElasticWorld)
        model.world.on_enter = self._renumber

    @property
    def rank(self) -> int:
        """The number of this rank among those that remain."""
        self._renumber()
        return self._members.index(self._world.member)

    @property
    def world_size(self) -> int:
        """The number of ranks that remain."""
        self._renumber()
        return len(self._members)

    def check_complete(self) -> None:
        """Raise GossipError if a rank has been lost: a model is constructed by all. Local."""
        if self.world_size < self._num_initial:
            lost = [str(number) for number in range(self._num_initial) if number not in self._members]
            raise GossipError(
                f"a training begins with all ranks, but of {self._num_initial} these are lost: {', '.join(lost)}; "
                "start all of them again"
            )

    def install(self) -> None:
        """Replace the functions of ``torch.distributed`` that have a method here until :meth:`close`. Local."""
        for name, operation in vars(type(self)).items():
            if not name.startswith("_") and hasattr(dist, name):
                self._installed.enter_context(_replaced(name, operation.__get__(self)))

    def close(self) -> None:
        """Put torch's functions back, and end communication. Local."""
        self._installed.close()
        self._world.close()

    def _current(self) -> ElasticWorld:
        model = self._model()
        has_ended = model is None or model._live().error is not None
        world = self._world if has_ended or model is None else model.world
        assert isinstance(world, ElasticWorld)
        return world

    def _renumber(self) -> None:
        """Follow the world. Local.

        Ranks that it has lost stay lost in the other one, which may learn of it later.
        """
        remaining = self._current().members
        members = tuple(member for member in self._members if member in remaining)
        if members != self._members:
            self._members = members
            self._on_change(members.index(self._world.member), len(members))

    def _gather(self, payload: bytes, what: str) -> list[bytes]:
        world = self._current()
        if joined := [member for member in world.members if member >= self._num_initial]:
            raise GossipError(
                f"{what}: rank {joined[0]} has joined, and takes no part in the collective operations of a library; "
                "write them with model.world, or do not start ranks again (restart=)"
            )
        return world.gather_bytes(payload, what)

    def _gathered(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        return [_tensor_of(each, tensor, what) for each in self._gather(_bytes_of(tensor), what)]

    def _source(self, src: int | None, found: list[Any], what: str) -> Any:
        if not 0 <= (src or 0) < len(found):
            raise GossipError(f"{what}: src={src}, but {len(found)} ranks remain, which are numbered from 0")
        return found[src or 0]

    def broadcast_module(self, module: nn.Module, what: str) -> None:
        """Replace the parameters and buffers of a module by those of the first rank. Collective."""
        self._current().broadcast_(itertools.chain(module.parameters(), module.buffers()), what)

    # ------------------------------------------------------------------ as in torch.distributed

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return self.world_size

    def barrier(self, device_ids: Any = None) -> None:
        del device_ids
        self._gather(b"", "barrier")

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        if op not in _REDUCTIONS:
            raise GossipError(f"all_reduce: op must be SUM, AVG, MIN, MAX or PRODUCT where ranks can be lost, got {op}")
        tensor.detach().copy_(_REDUCTIONS[op](torch.stack(self._gathered(tensor, "all_reduce"))))

    def reduce(self, tensor: torch.Tensor, dst: int | None = None, op: Any = dist.ReduceOp.SUM) -> None:
        del dst
        self.all_reduce(tensor, op)

    def broadcast(self, tensor: torch.Tensor, src: int | None = None) -> None:
        found = b""
        while tensor.numel() and not found:  # again if the source has been lost, and its number is another rank's
            sent = _bytes_of(tensor) if self.rank == (src or 0) else b""
            found = self._source(src, self._gather(sent, "broadcast"), "broadcast")
        if found:
            tensor.detach().copy_(_tensor_of(found, tensor, "broadcast"))

    def broadcast_object_list(self, object_list: list[Any], src: int | None = None, device: Any = None) -> None:
        del device
        found = self._gather(_packed(list(object_list)), "broadcast_object_list")
        object_list[:] = _unpacked(self._source(src, found, "broadcast_object_list"))

    def all_gather(self, tensor_list: list[torch.Tensor], tensor: torch.Tensor) -> None:
        tensor_list[:] = self._gathered(tensor, "all_gather")

    def all_gather_into_tensor(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor) -> None:
        found = torch.cat([each.view(-1) for each in self._gathered(input_tensor, "all_gather_into_tensor")])
        if output_tensor.numel() != found.numel():
            output_tensor.resize_(found.numel())
        output_tensor.copy_(found.view(output_tensor.shape))

    def all_gather_object(self, object_list: list[Any], obj: Any) -> None:
        object_list[:] = map(_unpacked, self._gather(_packed(obj), "all_gather_object"))

    def gather_object(self, obj: Any, object_gather_list: list[Any] | None = None, dst: int | None = None) -> None:
        found = self._gather(_packed(obj), "gather_object")
        if self.rank == (dst or 0) and object_gather_list is not None:
            object_gather_list[:] = map(_unpacked, found)


def _packed(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpacked(content: bytes) -> Any:
    """Return what another rank has sent: tensors and plain data, since unpickling anything runs what it says."""
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        raise GossipError(
            "where ranks can be lost, only tensors and plain data (numbers, strings, lists, dicts) are gathered "
            f"and broadcast as objects: {reason(error)}"
        ) from error


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _tensor_of(payload: bytes, like: torch.Tensor, what: str) -> torch.Tensor:
    if len(payload) != like.nbytes:
        raise GossipError(f"{what}: a rank passes a tensor of {len(payload)} bytes, and this one of {like.nbytes}")
    flat = torch.frombuffer(bytearray(payload), dtype=like.dtype) if payload else torch.empty(0, dtype=like.dtype)
    return flat.view(like.shape).to(like.device)


class _Ended:
    """What ``async_op=True`` returns: the operation has ended."""

    def wait(self, timeout: Any = None) -> bool:
        del timeout
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def _replaced(name: str, operation: Callable[..., Any]) -> Iterator[None]:
    original = getattr(dist, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        group = given.pop("group", None)
        if group is not None and group is not dist.group.WORLD:
            return original(*args, **kwargs)
        is_async = given.pop("async_op", False)
        given.pop("timeout", None)
        for of_group, of_all in (("group_src", "src"), ("group_dst", "dst")):
            if (number := given.pop(of_group, None)) is not None:
                given[of_all] = number
        result = operation(**given)
        return _Ended() if is_async else result

    setattr(dist, name, replacement)
    try:
        yield
    finally:
        setattr(dist, name, original)


def remaining_ranks(
    owner: object, options: Mapping[str, Any], on_change: Callable[[int, int], object]
) -> RemainingRanks | None:
    """Return what is installed while its owner lives, if ranks may be lost and this one has not joined. Collective.

    Raises ValueError: the options have a ``mesh``.
    """
    if options.get("on_peer_loss") != "continue" or not dist.is_initialized() or training_store.joined() is not None:
        return None
    if options.get("mesh") is not None:
        raise ValueError(
            'mesh cannot be combined with on_peer_loss="continue" here: a library operates with single ranks, and not '
            "with shard groups; leave one of the two out, or write the loop yourself"
        )
    ranks = RemainingRanks(options, on_change)
    ranks.install()
    weakref.finalize(owner, ranks.close)
    return ranks
