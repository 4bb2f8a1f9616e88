"""Profiling of a few steps with torch.profiler: one Chrome trace per rank, with the messages in all threads of gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from torch.profiler import profile

from gossip.private_torch import profile_all_threads

_FIRST_STEP, _NUM_STEPS = 5, 5  # the first steps allocate and warm up


class Tracer:
    """Profiles steps 5 to 9 of a run, or the last five of a shorter one, and writes a trace that Perfetto can open."""

    def __init__(self, path: Path, total_steps: int) -> None:
        self._path = path
        self._end = min(_FIRST_STEP + _NUM_STEPS, total_steps)
        self._begin = max(0, self._end - _NUM_STEPS)
        self._profiler: profile | None = None

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profile a step that lies in the window; write the trace after the last of them."""
        if self._begin <= step < self._end and self._profiler is None:
            self._profiler = profile(experimental_config=profile_all_threads())
            self._profiler.start()
        yield
        if step >= self._end - 1:  # a rank that comes back to others has missed some
            self.close()

    def close(self) -> None:
        """Write the trace, also of an incomplete window, unless it has been written."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._path))
            self._profiler = None
