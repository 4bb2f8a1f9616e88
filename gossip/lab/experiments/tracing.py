"""Profiling of a few steps with torch.profiler: one Chrome trace per rank, with each exchange from start to arrival."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import profile

from gossip import Conversation, DistributedTransport, World
from gossip.exchange.distributed_transport import DistributedExchange
from topologies import Round, Topology

FORWARD = "forward"
BACKWARD = "backward"
_FIRST_STEP, _NUM_STEPS = 5, 5  # the first steps allocate and warm up
_FIRST_ROW = 1_000_000_000  # larger than any thread id


class TracedExchange(NamedTuple):
    """One exchange of a bucket in a step; its times are values of ``time.perf_counter()``, None before its end."""

    step: int
    bucket: int
    bytes_sent: int
    started_at: float
    finished_at: Callable[[], float | None]


class Tracer:
    """Profiles steps 5 to 9 of a run, or the last five of a shorter one, and writes a trace that Perfetto can open.

    The exchanges of each bucket have a row of their own, because they run in threads that torch.profiler does not see.

    The trace is written to ``path`` once the last exchange of the profiled window has arrived.
    """

    def __init__(self, path: Path, total_steps: int) -> None:
        self._path = path
        self._end = min(_FIRST_STEP + _NUM_STEPS, total_steps)
        self._begin = max(0, self._end - _NUM_STEPS)
        self._profiler: profile | None = None
        self._is_active = False
        self._exchanges: list[TracedExchange] = []
        self._forward_started_at: list[float] = []

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profile a step that lies in the window, which begins with its forward pass; write the trace when possible."""
        if step == self._begin:
            self._profiler = profile()
            self._profiler.start()
            self._is_active = True
        if self._is_active:
            self._forward_started_at.append(time.perf_counter())
        yield
        if step == self._end - 1:
            self._stop()
        elif step >= self._end and all(exchange.finished_at() is not None for exchange in self._exchanges):
            self._write()

    def exchange_started(self, exchange: TracedExchange) -> None:
        """Record an exchange if it starts within the profiled window."""
        if self._is_active:
            self._exchanges.append(exchange)

    def close(self) -> None:
        """Write the trace, without the exchanges that have not arrived."""
        self._stop()
        self._write()

    def _stop(self) -> None:
        if self._is_active and self._profiler is not None:
            self._profiler.stop()
            self._is_active = False

    def _write(self) -> None:
        if self._profiler is None:
            return
        partial = self._path.with_name(f"{self._path.name}.partial")
        self._profiler.export_chrome_trace(str(partial))
        self._profiler = None
        trace = json.loads(partial.read_text(encoding="utf-8"))
        trace["traceEvents"] += list(self._exchange_events(trace["traceEvents"]))
        partial.write_text(json.dumps(trace), encoding="utf-8")
        partial.replace(self._path)

    def _exchange_events(self, events: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield each exchange as a complete ("X") trace event, after an event that names its row."""
        forwards = sorted(event["ts"] for event in events if event.get("name") == FORWARD and event["ph"] == "X")
        begun = zip(forwards, self._forward_started_at, strict=False)
        # Both clocks recorded when the forward passes began, the profiler's slightly later: this gives their offset.
        offset_us = min((ts - 1e6 * started_at for ts, started_at in begun), default=0.0)
        for exchange in self._exchanges if forwards else ():
            if (finished_at := exchange.finished_at()) is None:
                continue
            row, bucket = {"pid": os.getpid(), "tid": _FIRST_ROW + exchange.bucket}, f"bucket {exchange.bucket}"
            yield {**row, "ph": "M", "name": "thread_name", "args": {"name": f"exchanges of {bucket}"}}
            yield {
                **row,
                "ph": "X",
                "cat": "user_annotation",
                "name": f"exchange of {bucket}",
                "ts": 1e6 * exchange.started_at + offset_us,
                "dur": 1e6 * (finished_at - exchange.started_at),
                "args": {"step": exchange.step, "bucket": exchange.bucket, "bytes_sent": exchange.bytes_sent},
            }


class TracedTransport(DistributedTransport):
    """A :class:`gossip.DistributedTransport` that reports each exchange to a tracer."""

    def __init__(self, world: World, topology: Topology, tracer: Tracer, *, sums_on_wire: bool = True) -> None:
        super().__init__(world, topology, sums_on_wire=sums_on_wire)
        self._tracer = tracer

    def start(self, conversation: Conversation, round_: Round, *, step: int, bucket: int) -> DistributedExchange:
        started_at = time.perf_counter()
        exchange = super().start(conversation, round_, step=step, bucket=bucket)
        pending, num_bytes = exchange.pending, sum(exchange.bytes_by_peer.values())

        def finished_at() -> float | None:
            return max(pending.finished_at.values()) if pending.done and pending.finished_at else None

        self._tracer.exchange_started(TracedExchange(step, bucket, num_bytes, started_at, finished_at))
        return exchange
