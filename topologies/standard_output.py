"""The end of a program whose output is not read to its end, as in ``program | head``."""

import os
import select
import sys
from collections.abc import Callable
from typing import TypeVar

CUT = 141
"""The exit status of a program that SIGPIPE ends (128 + 13)."""


Status = TypeVar("Status", int, int | None)


def ends_quietly(main: Callable[[], Status]) -> Status | int:
    """Return the status of ``main``, or 141 without a message if the reader of standard output has gone.

    SIGPIPE itself stays ignored, as Python has it: it would end a process for a socket that a peer has closed.
    """
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()  # here, because an error at the interpreter's end could not be caught
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if not any(event & select.POLLERR for _, event in poll.poll(0)):
            raise  # of another pipe: the reader of this one is there
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # takes what is still in the buffer
        os.close(nowhere)
        return CUT
