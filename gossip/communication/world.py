"""The ranks that gossip with each other, and the few collectives over all of them."""

import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gossip.communication.device_paths import DevicePaths, OnDevice, Tensors
from gossip.communication.host import forks
from gossip.communication.host.daemon_threads import CLOSING_PATIENCE
from gossip.communication.host.open_files import check_open_files
from gossip.communication.host.tcp_options import resending_soon
from gossip.communication.host.worker_threads import Job, Operation, WorkerThreads, posted
from gossip.communication.liveness.progress_markers import ProgressMarkers
from gossip.communication.membership import Group, Membership, gloo_group, own_connection
from gossip.communication.waiting import Awaited, Ended, Failure, checked_timeout, wait_for
from gossip.compression.conversation import accumulation_dtype
from gossip.errors import ExchangeError, GossipError
from gossip.private_torch import known_groups

# So that our time-out, including the search for the cause, passes first: it names rank and operation, gloo only an
# address.
_GROUP_TIMEOUT_FACTOR = 3
_AVERAGE_CHUNK_BYTES = 64 * 2**20
_LENGTH_BYTES, _HEAD_BYTES = 8, 248  # the length of what is gathered, and how much of the content is sent along with it
_TOGETHER_BYTES = 2**20  # tensors below this size are broadcast in messages of up to this size
_parents_groups: list[object] = []  # in a forked child, the groups that its parent has joined

_Result = TypeVar("_Result")
Post = Callable[[Tensors, Tensors], Any]
"""Starts an operation that sends the first tensors and fills the second ones."""


class World:
    """All ranks of one wrapped model; with one process and no process group, a world of one.

    Parameters
    ----------
    timeout : timedelta
        How long any wait may last before it raises.
    process_group : ProcessGroup, optional
        The ranks that gossip with each other; all ranks by default. Ranks are numbered within it.

    Raises
    ------
    ValueError
        ``timeout`` is not positive, or this rank is not a member of ``process_group``.
    RuntimeError
        The environment indicates several processes, but ``torch.distributed`` is not initialised.

    Attributes
    ----------
    rank, world_size : int
        This rank, and the number of ranks.
    membership : Membership or None
        Their ranks in the default process group, and their backends; None without ``torch.distributed``.
    group : ProcessGroup, ProcessGroupGloo or None
        A communicator of all ranks; None in a world of one. With gloo, and by default with other backends, it is one
        that nothing else uses; with another backend and ``process_group``, it is that group itself.
    worker_threads : WorkerThreads or None
        Carries all communication of this world from and to CPU memory, in one order.
    device_paths : DevicePaths or None
        The paths of a device's tensors into a communicator.
    progress_markers : ProgressMarkers
        Tells the others how far this rank has come.

    Notes
    -----
    Construction is collective: every rank of the process group must construct it. What is collective raises
    ExchangeError if a rank does not take part in time.
    """

    def __init__(self, timeout: timedelta, process_group: dist.ProcessGroup | None = None) -> None:
        self.timeout = checked_timeout(timeout)
        self.rank, self.world_size = 0, 1
        self.membership: Membership | None = None
        self.group: Group = None
        self.worker_threads: WorkerThreads | None = None
        self.device_paths: DevicePaths | None = None
        self._communicators: dict[tuple[str, tuple[int, ...]], Group] = {}
        self._registered: list[dist.ProcessGroup] = []
        self._store: dist.Store | None = None
        self.progress_markers = ProgressMarkers(None, 0, 1)
        if dist.is_initialized():
            self.membership = Membership.of(process_group)
            self.rank, self.world_size = self.membership.rank, len(self.membership.ranks)
        elif process_group is not None:
            raise ValueError("process_group was passed, but torch.distributed is not initialised; initialise it first")
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RuntimeError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed is not initialised; call "
                "torch.distributed.init_process_group first, or start the function with gossip.launch"
            )
        if self.world_size > 1 or (self.membership is not None and self._may_grow):
            assert self.membership is not None
            if any(group is self.membership.group for group in _parents_groups):
                raise GossipError(f"rank {self.rank}: {forks.FORKED}")
            check_open_files(self.rank, self.world_size)
            forks.watch(self)
            try:
                self._join()
            except BaseException:
                self.close()
                raise

    def _join(self) -> None:
        """Call the roll, then connect, so that an absent rank is named before any rank blocks in library code."""
        assert self.membership is not None
        self._store = self.membership.store()
        with resending_soon(self.timeout):
            notes = None if self._store is None else self._guarded(own_connection(self._store), "progress markers")
        self.progress_markers = ProgressMarkers(notes, self.rank, self.world_size)
        self.progress_markers.note("constructing the model")
        absent: str | None = "interrupted"
        try:
            absent = self.progress_markers.wait_for_all(self.timeout)
        except ExchangeError as error:
            raise ExchangeError(f"rank {self.rank}: constructing the model: {error}") from error
        finally:
            if absent is not None:
                self.progress_markers.note_giving_up()
        if absent is not None:
            raise ExchangeError(
                f"rank {self.rank}: constructing the model: not all of the {self.world_size} ranks took part within "
                f"{self.timeout.total_seconds():g} s: {absent}; every rank{self._in_group()} must construct it"
            )
        self._connect()

    def _guarded(self, store: dist.Store, name: str) -> dist.Store:  # noqa: ARG002
        """Return a store in which this rank and the others keep what ``name`` says. Local."""
        return store

    def _connect(self) -> None:
        """Create what carries messages, once all ranks are known to be present."""
        assert self.membership is not None
        self.worker_threads = WorkerThreads(f"gossip-{self.rank}", self.timeout)
        self.device_paths = DevicePaths(self.worker_threads, self.membership.backends)
        if self.membership.can_split:
            self.group = self.communicator(range(self.world_size), "world")
        else:
            self.group = self.membership.group

    @property
    def is_alone(self) -> bool:
        """Whether it is a world of one."""
        return self.group is None

    @property
    def changes(self) -> bool:
        """Whether ranks may be lost, leave and join."""
        return False

    @property
    def _may_grow(self) -> bool:
        """Whether others will join, so that one rank is no world of its own."""
        return False

    @property
    def is_joint(self) -> bool:
        """Whether a collective operation is in progress that ranks may repeat."""
        return False

    @property
    def patience(self) -> timedelta:
        """How long a collective that torch waits for may last."""
        return self.timeout

    def collectively(self, operation: Callable[[], _Result], undo: Callable[[], object] = lambda: None) -> _Result:
        """Return the result of ``operation``, which consists of collectives and what is computed from them. Collective.

        If ranks continue without lost ones, it either completes on all of them, or the remaining ranks repeat it, after
        ``undo``.
        """
        del undo
        return operation()

    def check_joint(self) -> None:
        """Raise GossipError if this rank may not take part in collective operations now. Local."""

    @property
    def can_split(self) -> bool:
        """Whether communicators of some of the ranks can be created."""
        return self.membership is not None and self.membership.can_split

    def communicator(self, ranks: Sequence[int], purpose: str) -> Group:
        """Return the communicator of ``ranks`` for ``purpose``; it is created on the first call.

        Creation is collective: with gloo over ``ranks``, which must include this one, with other backends over all
        ranks. :meth:`close` releases it.
        """
        key = (purpose, tuple(ranks))
        if key not in self._communicators:
            self._communicators[key] = self._make_communicator(key[1], purpose)
        return self._communicators[key]

    def _make_communicator(self, ranks: tuple[int, ...], purpose: str) -> Group:
        assert self.membership is not None
        if not self.membership.is_gloo:
            if len(ranks) == self.world_size and self.group is not None:
                return self.group  # NCCL spends hundreds of MB for each
            assert self.membership.can_split
            return self.new_group(ranks)
        assert self._store is not None
        assert self.worker_threads is not None
        store, made = self._store, list[Group]()
        patience = _GROUP_TIMEOUT_FACTOR * self.patience

        def connect() -> Job:
            with resending_soon(self.timeout):
                made.append(gloo_group(store, f"{purpose} {ranks}", ranks.index(self.rank), len(ranks), patience))
            # A rank that closed at once would break the connections that others are still making.
            yield (Operation("all its ranks", made[0].barrier()),)

        # In the background, because connecting cannot be interrupted.
        ticket = self.worker_threads.submit(connect())
        where = f"making a communicator of ranks {list(ranks)}"
        others = [rank for rank in ranks if rank != self.rank]
        # Before there is a connection, none reveals a death; a process that has ended will not come any more.
        if (failure := self.wait_for(ticket, where, lambda: others, sequence=sys.maxsize)) is not None:
            raise self.lost(
                failure, f"{where}: not all of them took part within {failure.timeout_s:g} s", ticket.error
            ) from ticket.error
        return made[0]

    def wait_for(
        self, awaited: Awaited, where: str, ranks: Callable[[], Sequence[int]], *, sequence: int | None = None
    ) -> Failure | None:
        """Wait for other ranks, within the time-out: see ``gossip.communication.waiting.wait_for``."""
        return wait_for(awaited, self.progress_markers, self.timeout, where=where, ranks=ranks, sequence=sequence)

    def lost(self, failure: Failure, text: str, cause: Exception | None = None, advice: str = "") -> ExchangeError:
        """Return the error for a failed wait, with ``text`` and the failed ranks; or ``cause`` if it is one."""
        if isinstance(cause, ExchangeError):
            return cause
        failed_ranks = failure.verdict.failed_ranks
        if self.membership is not None:
            failed_ranks = tuple(self.membership.ranks[rank] for rank in failed_ranks)
        return ExchangeError(f"rank {self.rank}: {text}: {failure.verdict.text}{advice}", failed_ranks=failed_ranks)

    def not_called(self, failure: Failure, what: str, cause: Exception | None = None) -> ExchangeError:
        """Return the error for a collective that has failed: every rank must call it, and which have not."""
        verdict, late = failure.verdict, ""
        if cause is None and failure.has_timed_out:
            late = f"not all of the {self.world_size} ranks took part within {failure.timeout_s:g} s"
        rule = f"every rank{self._in_group()} must call it, after the same number of steps"
        if verdict.is_certain and verdict.source is None:  # that a rank has ended, say, is the cause
            return self.lost(failure, ": ".join(filter(None, [what, late])), cause, f"; {rule}")
        if len(verdict.failed_ranks) == len(self.others):
            rule += f" (called on rank {self.rank} only?)"
        return self.lost(failure, f"{what}: {'; '.join(filter(None, [rule, late]))}", cause)

    def lost_by(self, cause: Exception, text: str) -> ExchangeError:
        """Return the error for a failed operation of torch's own classes, whose peers leave no notes."""
        failure = self.wait_for(Ended(cause), text, lambda: self.others)
        if failure is None or not (failure.verdict.is_certain and failure.verdict.failed_ranks):
            return ExchangeError(f"rank {self.rank}: {text}: the connection to another rank is closed")
        return self.lost(failure, text)

    @property
    def member(self) -> int:
        """This rank's number at the beginning, by which the log and errors name it."""
        return self.rank

    @property
    def worker(self) -> int:
        """The number of this rank's replica at the beginning, by which topologies and draws know it."""
        return self.rank

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks, by their numbers at the beginning."""
        return tuple(range(self.world_size))

    @property
    def others(self) -> list[int]:
        """All ranks except this one."""
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Create a group of ``ranks`` for torch's own classes, which :meth:`close` releases.

        Collective over all processes of the default process group, including ranks outside ``ranks``.
        """
        patience = _GROUP_TIMEOUT_FACTOR * self.patience
        members = list(ranks) if self.membership is None else [self.membership.ranks[rank] for rank in ranks]
        try:
            group: dist.ProcessGroup = dist.new_group(members, timeout=patience)
        except RuntimeError as error:
            raise ExchangeError(
                f"rank {self.rank}: making a communicator of ranks {list(ranks)}: not all of the {self.world_size} "
                f"ranks took part within {patience.total_seconds():g} s; every rank must construct the model ({error})"
            ) from error
        if self.rank in ranks:
            self._registered.append(group)
        return group

    def gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        """Return every rank's ``payload``, by rank. Collective. (Plain bytes: what a peer sends is never unpickled.)

        A short payload is sent along with its length, in a single message; of a longer one, the rest follows.
        """
        if self.is_alone:
            return [payload]
        head = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[:_HEAD_BYTES]
        heads = self._gather_rows(head, _LENGTH_BYTES + _HEAD_BYTES, what)
        lengths = [int.from_bytes(row[:_LENGTH_BYTES], "little") for row in heads]
        rest = max(lengths) - _HEAD_BYTES
        tails = self._gather_rows(payload[_HEAD_BYTES:], rest, what) if rest > 0 else [b""] * self.world_size
        return [(row[_LENGTH_BYTES:] + tail)[:length] for row, tail, length in zip(heads, tails, lengths, strict=True)]

    def gather_json(self, content: Any, what: str) -> list[Any]:
        """Return every rank's plain ``content``, by rank; a tuple arrives as a list, a float unchanged. Collective."""
        return [json.loads(data) for data in self.gather_bytes(json.dumps(content).encode(), what)]

    def _gather_rows(self, row: bytes, length: int, what: str) -> list[bytes]:
        """Return every rank's ``row``, padded to ``length``, by rank. Collective."""
        assert self.membership is not None
        own = torch.frombuffer(bytearray(row.ljust(length, b"\0")), dtype=torch.uint8).to(self.control_device)
        rows = own.new_empty(self.world_size, length)
        group = self.group
        if self.membership.has_host_path:
            # gloo's own allgather uses a ring, in which every rank waits for n - 1 successive messages.
            options = dist.GatherOptions()  # to rank 0
            posts: list[Post] = [
                lambda sent, received: group.gather([list(received[0])] * (self.rank == 0), list(sent), options),
                lambda _, received: group.broadcast(received[0], 0),
            ]
        else:
            posts = [lambda sent, received: group.allgather([list(received[0])], list(sent))]
        self.begin(posts, [own], [rows], what)()
        return [values.tobytes() for values in rows.cpu().numpy()]

    @torch.no_grad()
    def broadcast_(self, tensors: Iterable[torch.Tensor], what: str) -> None:
        """Copy rank 0's values into ``tensors``, of any dtypes, in place. Collective.

        Tensors below 1 MiB are copied into messages of up to that size.
        """
        if self.is_alone:
            return
        group = self.group
        for load in _loads(tensors):
            # As bytes, because gloo supports only some dtypes but copies all of them equally.
            rows = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in load]
            data = self.on_wire(rows[0] if len(rows) == 1 else torch.cat(rows))
            self.begin([lambda _, received: group.broadcast(received[0], 0)], [data], [data], what)()
            for tensor, row in zip(load, data.split([row.numel() for row in rows]), strict=True):
                if row.data_ptr() != tensor.data_ptr():
                    tensor.copy_(row.clone().view(tensor.dtype).view(tensor.shape))  # cloned in order to be aligned

    def average_(self, tensor: torch.Tensor, what: str) -> None:
        """Replace ``tensor`` by its mean over ranks, in place. Collective. Half precision is summed in float32.

        A tensor that is not contiguous, or whose dtype is neither float32 nor float64, is averaged through one chunk of
        memory.
        """
        if self.is_alone or tensor.numel() == 0:
            return
        dtype = accumulation_dtype(tensor.dtype)
        if tensor.dtype == dtype and tensor.is_contiguous():
            self.sum_(tensor, what)
            tensor.div_(self.world_size)
            return
        flat = tensor.reshape(-1)
        for chunk in flat.split(_AVERAGE_CHUNK_BYTES // dtype.itemsize):
            wide = chunk.to(dtype)
            self.sum_(wide, what)
            chunk.copy_(wide.div_(self.world_size))
        tensor.copy_(flat.view(tensor.shape))

    def sum_(self, tensor: torch.Tensor, what: str, *, holds_host: bool = True) -> None:
        """Replace ``tensor`` by its sum over ranks, in place. Collective.

        Unless it ``holds_host``, the host does not wait for a device that it need not wait for.
        """
        if self.is_alone:
            return
        data = self.on_wire(tensor)
        group = self.group
        posts: list[Post] = [lambda _, received: group.allreduce([received[0]])]
        self.begin(posts, [data], [data], what, holds_host=holds_host)()
        if data is not tensor:
            tensor.copy_(data)

    def keys(self, name: str) -> dist.Store | None:
        """Return keys for other agreements of the ranks, over a separate connection; None if there is no store."""
        return None if self._store is None else own_connection(dist.PrefixStore(name, self._store))

    def close(self) -> None:
        """End the worker threads and release all communicators, unless a blocked peer holds them. Local.

        In a forked child nothing is released.
        """
        ended = self.worker_threads is None or self.worker_threads.close(CLOSING_PATIENCE)
        if ended and dist.is_initialized():
            for group in self._registered:
                dist.destroy_process_group(group)
        if not ended:
            forks.keep(*self._communicators.values())
        self._registered.clear()
        self._communicators.clear()
        self.progress_markers.close()
        self.worker_threads = self.device_paths = self.group = self._store = None

    def leave_to_parent(self) -> None:
        """Implement ``gossip.communication.host.forks.Inherited``."""
        _parents_groups.extend(known_groups())  # torch's own groups wait for threads, too, when the child ends
        forks.keep(self._store, self.progress_markers, *self._communicators.values(), *_parents_groups)
        self.progress_markers = ProgressMarkers(None, self.rank, self.world_size)

    @property
    def control_device(self) -> torch.device:
        """The device for messages of this class itself: the CPU, if its backend supports it."""
        assert self.membership is not None
        if "cpu" in self.membership.backends:
            return torch.device("cpu")
        kind = next(iter(self.membership.backends))
        return torch.device(kind, torch.get_device_module(kind).current_device())

    def on_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` itself, or a copy on a device that a backend supports."""
        assert self.device_paths is not None
        return tensor if self.device_paths.serves(tensor.device) else tensor.to(self.control_device)

    def _in_group(self) -> str:
        assert self.membership is not None
        if not self.membership.is_given:
            return ""
        return f" of process_group (ranks {list(self.membership.ranks)} of the default one)"

    def begin(
        self,
        posts: Sequence[Post],
        sent: Tensors,
        received: Tensors,
        what: str,
        *,
        holds_host: bool = True,
        paths: DevicePaths | None = None,
    ) -> Callable[[], None]:
        """Start each operation when the previous one has ended, and return what waits for the last. Collective.

        Tensors are such as :meth:`on_wire` returns; ``what`` is for error texts. Waiting ``holds_host`` until the
        device has ended its part, or else only what follows on the device. Other ``paths`` than ``device_paths``
        have an order of their own.
        """
        paths = paths or self.device_paths
        assert paths is not None
        self.progress_markers.note(what)

        def job(*tensors: Tensors) -> Job:
            for post in posts:
                yield (posted("all other ranks", functools.partial(post, *tensors)),)
                yield None

        pending = paths.submit(job, list(sent), list(received))
        sequence = self.progress_markers.sequence

        def wait() -> None:
            awaited = OnDevice(pending, received[0].device) if holds_host else pending
            failure = self.wait_for(awaited, what, lambda: self.others, sequence=sequence)
            if failure is None:
                return
            raise self.not_called(failure, what, pending.error) from pending.error

        return wait


def _loads(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group the tensors that are sent in one message, by the same rule on all ranks; empty ones are left out."""
    filling: dict[torch.device, list[torch.Tensor]] = {}
    filled: Counter[torch.device] = Counter()
    for tensor in tensors:
        if tensor.nbytes >= _TOGETHER_BYTES:
            yield [tensor]
        elif tensor.nbytes > 0:
            if filled[tensor.device] + tensor.nbytes > _TOGETHER_BYTES:
                yield filling.pop(tensor.device)
                filled[tensor.device] = 0
            filling.setdefault(tensor.device, []).append(tensor)
            filled[tensor.device] += tensor.nbytes
    yield from filling.values()
