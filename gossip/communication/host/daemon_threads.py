"""Background threads that end before the interpreter does."""

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
"""How long the end of communication may take before blocked threads are abandoned."""


class _Ending(NamedTuple):
    end: Callable[[], object]
    patience: timedelta


_endings: weakref.WeakKeyDictionary[threading.Thread, _Ending] = weakref.WeakKeyDictionary()


def start(
    name: str,
    run: Callable[[], None],
    *,
    end: Callable[[], object],
    failed: Callable[[Exception], object],
    patience: timedelta = CLOSING_PATIENCE,
) -> threading.Thread:
    """Start a daemon thread that is told to end, and waited for, when the program ends.

    When a daemon thread asks for the interpreter after finalization has begun, CPython before 3.14 ends the thread by
    unwinding its stack, and C++ aborts the process if the unwinding meets a function that must not throw, such as the
    end of ``Work.wait`` or of a tensor. So none of these threads may be left by then. Exit handlers run before
    finalization, and the program's own run before this one if they were registered after ``import torch``.

    Parameters
    ----------
    name : str
        The name of the thread.
    run : callable
        The function that the thread runs.
    end : callable
        Makes ``run`` return as soon as what it waits for permits; called once, when the program ends. It must not hold
        references to objects that must not outlive their owners.
    failed : callable
        Called in the thread with an exception that ``run`` raises, which ends the thread. It must tell whoever relies
        on the thread, with the same restriction as ``end``.
    patience : timedelta
        How long the end of the program waits for the thread. A program that fails waits no longer than
        ``CLOSING_PATIENCE``, so that its peers are notified soon.
    """

    def run_or_fail() -> None:
        try:
            run()
        except Exception as error:
            failed(error)

    thread = threading.Thread(target=run_or_fail, name=name, daemon=True)
    _endings[thread] = _Ending(end, patience)
    if not _program_end().alive:  # it has run, but an exit handler that was registered earlier still needs a thread
        _let_the_stuck_sleep()
    thread.start()
    return thread


def weak_run(owner: object, turn: Callable[..., bool]) -> Callable[[], None]:
    """Return the function of a thread that takes turns for as long as its owner lives and has more of them."""
    reference = weakref.ref(owner)

    def run() -> None:
        while (alive := reference()) is not None and turn(alive):
            del alive

    return run


def weak_call(owner: object, method: Callable[..., object]) -> Callable[[Exception], None]:
    """Return a function that passes an exception to a method of its owner, if that is still alive."""
    reference = weakref.ref(owner)

    def call(error: Exception) -> None:
        if (alive := reference()) is not None:
            method(alive, error)

    return call


@functools.cache
def _program_end() -> weakref.finalize[[], Callable[..., object]]:
    os.register_at_fork(after_in_child=_endings.clear)  # the threads are the parent's
    # Among weakref's handlers, which were registered when torch was imported, so nearly all others run before.
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
                f"gossip: the program has ended, but not yet its threads that exchange messages or save a checkpoint "
                f"({names}); waiting for them for up to {max(left.values()).total_seconds():g} s, the model's timeout",
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
    """Put a thread to sleep forever that could otherwise only abort the process, as CPython 3.14 does.

    A blocked peer may release a thread at any moment, even while the interpreter finalizes. The process then continues
    to its regular end: the other exit handlers, the contents of buffers, and the program's own status, which no exit
    handler can know.
    """
    with contextlib.suppress(OSError, AttributeError):  # with another C++ library nothing is changed
        cpp, c = ctypes.CDLL("libstdc++.so.6"), ctypes.CDLL(None)
        cpp._ZSt13set_terminatePFvvE(ctypes.cast(c.pause, ctypes.c_void_p))  # std::set_terminate(pause)
