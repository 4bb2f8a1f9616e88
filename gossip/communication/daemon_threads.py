"""Threads in the back that are over before the interpreter is."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import NamedTuple

CLOSING_PATIENCE = timedelta(seconds=1)
"""How long the end of communication may take before what is stuck is left alone."""


class _Ending(NamedTuple):
    end: Callable[[], object]
    patience: timedelta


_endings: weakref.WeakKeyDictionary[threading.Thread, _Ending] = weakref.WeakKeyDictionary()


def start(
    name: str, run: Callable[[], None], *, end: Callable[[], object], patience: timedelta = CLOSING_PATIENCE
) -> threading.Thread:
    """Start a daemon thread that is told to end, and waited for, when the program does.

    CPython before 3.14 ends a daemon thread that wants the interpreter after its finalization has begun by unwinding
    its stack, and C++ aborts the process where that meets a function that must not throw: the end of ``Work.wait``, or
    of a tensor. So none may be left by then. Exit handlers come before, the program's own before this one as long as
    they were registered after ``import torch``.

    Parameters
    ----------
    name : str
    run : callable
        The thread's life.
    end : callable
        Makes ``run`` return, as soon as what it waits for lets it; called once, when the program ends. It must not hold
        what must not outlive its owner.
    patience : timedelta
        How long the program's end waits for it; the end of a program that fails waits no longer than
        ``CLOSING_PATIENCE``, so that its peers are soon told.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    _endings[thread] = _Ending(end, patience)
    if not _program_end().alive:  # it is over: an exit handler of an earlier date still asks for something
        _let_the_stuck_sleep()
    thread.start()
    return thread


@functools.cache
def _program_end() -> weakref.finalize[[], Callable[..., object]]:
    os.register_at_fork(after_in_child=_endings.clear)  # the threads are the parent's
    # Among the handlers of weakref, which were registered when torch was imported: nearly all others come before.
    return weakref.finalize(start, _end_all)


def _end_all() -> None:
    begin = time.monotonic()
    endings = dict(_endings)
    has_failed = getattr(sys, "last_value", None) is not None  # an exception has ended the program
    try:
        for end, _ in endings.values():
            end()
        _join({thread: min(patience, CLOSING_PATIENCE) for thread, (_, patience) in endings.items()}, begin)
        left = {thread: patience for thread, (_, patience) in endings.items() if thread.is_alive()}
        if left and not has_failed and max(left.values()) > CLOSING_PATIENCE:
            names = ", ".join(sorted(thread.name for thread in left))
            print(  # the logger has ended by now
                f"gossip: the program has ended, but messages are under way that a peer has not sent or taken yet "
                f"({names}); waiting for them up to {max(left.values()).total_seconds():g} s, the model's timeout",
                file=sys.stderr,
                flush=True,
            )
            _join(left, begin)
    finally:
        if any(thread.is_alive() for thread in endings):
            _let_the_stuck_sleep()


def _join(patiences: Mapping[threading.Thread, timedelta], begin: float) -> None:
    for thread, patience in patiences.items():
        thread.join(max(0.0, begin + patience.total_seconds() - time.monotonic()))


def _let_the_stuck_sleep() -> None:
    """Make a thread sleep for good that could only abort the process, which is what CPython 3.14 does.

    A peer that is stuck may let go of a thread at any moment, also while the interpreter finalizes. The process then
    goes on to its end by itself: the other exit handlers, what is left in buffers, and the program's own status, which
    no exit handler can know.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C++ library: as it was
        cpp, c = ctypes.CDLL("libstdc++.so.6"), ctypes.CDLL(None)
        cpp._ZSt13set_terminatePFvvE(ctypes.cast(c.pause, ctypes.c_void_p))  # std::set_terminate(pause)
