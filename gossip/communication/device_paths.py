"""The paths by which a device's tensors enter and leave a communicator."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch

from gossip.communication.host.worker_threads import Job, Operation, PostingError, WorkerThreads, Works, posted
from gossip.communication.membership import Group
from gossip.communication.waiting import Awaited
from gossip.private_torch import begin_coalescing, end_coalescing

_LONGEST_PAUSE_S = 0.005

Tensors = Sequence[torch.Tensor]
MakeJob = Callable[[Tensors, Tensors], Job]
"""Starts the job that sends the first tensors and fills the second ones."""


class Pending(Awaited, Protocol):
    """Operations in progress; ``wait`` returns whether they have ended as far as the current stream's work can see."""

    @property
    def awaited(self) -> str:
        """What the operation that is being awaited, or that failed, waits for."""

    @property
    def finished_at(self) -> Mapping[str, float]:
        """``time.perf_counter()`` when the operations of a name were seen to end; empty if the host cannot see it."""


class DevicePaths:
    """Chooses the path by a tensor's device and its backend.

    ================= ======================= ======================================================================
    device            backend                 path
    ================= ======================= ======================================================================
    cpu               any                     by :class:`gossip.communication.host.worker_threads.WorkerThreads`
    cuda and similar  gloo                    through pinned memory and these threads: gloo itself copies synchronously
    cuda and similar  all others (nccl)       posted at once on a separate stream; the host does not wait
    ================= ======================= ======================================================================
    """

    def __init__(self, worker_threads: WorkerThreads, backends: Mapping[str, str]) -> None:
        self._worker_threads = worker_threads
        self._backends = backends
        self._streams: dict[torch.device, Any] = {}

    def serves(self, device: torch.device) -> bool:
        """Return whether a backend supports tensors on this device."""
        return device.type in self._backends

    def go_through_host(self) -> None:
        """Carry the messages of all devices in host memory from now on, by gloo. Local, alike on all ranks."""
        self._backends = dict.fromkeys(self._backends, "gloo")

    def submit(self, make_job: MakeJob, sent: Tensors, received: Tensors) -> Pending:
        """Start the job; jobs run in the order of the calls.

        Parameters
        ----------
        make_job : callable
            Called once with the tensors that are communicated: ``sent`` and ``received``, or their copies.
        sent, received : sequence of Tensor
            Tensors on a single device; a tensor may be in both. They must not be changed until the operations have
            ended.
        """
        device = (*sent, *received)[0].device
        if device.type == "cpu":
            return self._worker_threads.submit(make_job(sent, received))
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.get_device_module(device.type).Stream(device)
        if self._backends.get(device.type) == "gloo":
            return _staged(self._worker_threads, stream, make_job, sent, received)
        return _OnStream(stream, make_job, sent, received)


class _OnStream:
    """Operations of a backend that works on the device's own streams.

    They are posted by the caller, in an order that is the same on all ranks, and each begins on the device after the
    previous one has ended: operations on several NCCL communicators would deadlock if two ranks ran them in different
    orders.
    """

    def __init__(self, stream: Any, make_job: MakeJob, sent: Tensors, received: Tensors) -> None:
        self.error: Exception | None = None
        self.awaited: str = "its own turn to be posted"
        self.finished_at: Mapping[str, float] = {}
        self._received = received
        self._device = stream.device
        self._module = torch.get_device_module(self._device.type)
        stream.wait_stream(self._module.current_stream(self._device))
        for tensor in (*sent, *received):
            tensor.record_stream(stream)  # its memory must not be reused meanwhile
        with self._module.stream(stream):
            try:
                for works in make_job(sent, received):
                    for self.awaited, work, *_ in works or ():
                        work.wait()  # only the stream waits
            except PostingError as error:
                self.awaited, self.error = error.awaited, error.cause
            except Exception as error:
                self.error = error
            self._event = stream.record_event()

    def wait(self, _: timedelta) -> bool:
        """Make the current stream wait; the host does not wait, and the backend's own time-out applies."""
        current = self._module.current_stream(self._device)
        current.wait_event(self._event)
        for tensor in self._received:
            tensor.record_stream(current)  # the caller's stream may be another one than that of the allocation
        return True


def _staged(worker_threads: WorkerThreads, stream: Any, make_job: MakeJob, sent: Tensors, received: Tensors) -> Pending:
    """Start operations on copies in pinned memory; the current stream copies what arrived when they are awaited."""
    copies: dict[int, torch.Tensor] = {}
    for tensor in (*sent, *received):
        if id(tensor) not in copies:
            copies[id(tensor)] = torch.empty_like(tensor, device="cpu", pin_memory=True)
    module = torch.get_device_module(stream.device.type)
    stream.wait_stream(module.current_stream(stream.device))
    with module.stream(stream):
        for tensor in sent:
            copies[id(tensor)].copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)  # its memory must not be reused meanwhile
        copied = stream.record_event()
    wire_sent = [copies[id(tensor)] for tensor in sent]
    wire_received = [copies[id(tensor)] for tensor in received]

    def job_when_copied() -> Job:
        copied.synchronize()
        yield from make_job(wire_sent, wire_received)

    def copy_back() -> None:
        for tensor, copy in zip(received, wire_received, strict=True):
            tensor.copy_(copy, non_blocking=True)
            tensor.record_stream(module.current_stream(tensor.device))

    return worker_threads.submit(job_when_copied(), copy_back)


class OnDevice(NamedTuple):
    """Operations that have ended only when the device has completed its part as well."""

    pending: Pending
    device: torch.device

    @property
    def error(self) -> Exception | None:
        """Why they failed."""
        return self.pending.error

    def wait(self, timeout: timedelta) -> bool:
        """Return whether they have ended within ``timeout``. Can be interrupted by Ctrl-C."""
        deadline = time.monotonic() + timeout.total_seconds()
        return self.pending.wait(timeout) and device_is_idle(self.device, deadline)


def device_is_idle(device: torch.device, deadline: float) -> bool:
    """Return whether the device has done the current stream's work in time; the CPU always has. Interruptible."""
    if device.type == "cpu":
        return True
    event = torch.get_device_module(device.type).current_stream(device).record_event()
    pause_s = 0.0
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s + 0.0001, _LONGEST_PAUSE_S)
    return True


class Message(NamedTuple):
    """A message that is sent to a rank or received from it."""

    peer: int
    tensor: torch.Tensor
    tag: int


def message_of(rank: int) -> str:
    """Describe what a receive from the rank awaits."""
    return f"the message from rank {rank}"


def taking_by(rank: int) -> str:
    """Describe what a send to the rank awaits."""
    return f"rank {rank} to receive ours"


def post_point_to_point(group: Group, receives: Sequence[Message], sends: Sequence[Message]) -> Works:
    """Post receives and sends.

    Receives are posted first, on every rank: gloo then moves large messages in both directions at once. In the opposite
    order two ranks take turns, at half the speed of the link.
    """
    if not receives and not sends:
        return ()
    device = (*receives, *sends)[0].tensor.device
    if device.type == "cpu":
        return [
            posted(awaited(peer), functools.partial(post, [tensor], peer, tag), tensor.nbytes)
            for messages, post, awaited in ((receives, group.recv, message_of), (sends, group.send, taking_by))
            for peer, tensor, tag in messages
        ]
    # In one call, because a device runs the operations between two ranks in turn, and a receive before a send on both
    # sides would never end.
    begin_coalescing(group, device)
    for peer, tensor, tag in receives:
        group.recv([tensor], peer, tag)
    for peer, tensor, tag in sends:
        group.send([tensor], peer, tag)
    peers = sorted({message.peer for message in (*receives, *sends)})
    name = f"the exchange with rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}"
    return (Operation(name, end_coalescing(group, device)),)
