"""Profiling of a few steps with torch.profiler: one Chrome trace per rank, with the messages in all threads of gloo."""

from __future__ import annotations

from pathlib import Path

from torch.profiler import ProfilerAction, profile

from gossip.private_torch import profile_all_threads

_FIRST_STEP, _NUM_STEPS = 5, 5  # the first steps allocate and warm up


def tracer(path: Path, total_steps: int) -> profile:
    """Return a profiler of steps 5 to 9 of a run, or the last five of a shorter one; call its ``step`` after each.

    It writes a trace that Perfetto can open after the last of them, or of an incomplete window when it is left.
    """
    end = min(_FIRST_STEP + _NUM_STEPS, total_steps)

    def action(step: int) -> ProfilerAction:
        if not end - _NUM_STEPS <= step < end:
            return ProfilerAction.NONE
        return ProfilerAction.RECORD if step < end - 1 else ProfilerAction.RECORD_AND_SAVE

    return profile(
        schedule=action,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        experimental_config=profile_all_threads(),
    )
