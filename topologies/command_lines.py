"""One spelling of the number of ranks on every command line, ``world_size=8``, whatever the parser behind it reads.

And the end of a program whose output is not read to its end, as in ``program | head``.
"""

import argparse
import itertools
import os
import re
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

_ALIASES = ("world_size", "--world-size", "--world_size", "--ranks", "launch.world_size", "bench.world_size")
MEANT = (
    "ranks", "num_ranks", "n", "np", "nproc", "nprocs", "nproc_per_node", "num_processes", "workers", "num_workers",
    "world", "worldsize", "processes",
)  # fmt: skip
"""What others call the number of ranks."""
_FLAG = "--world-size"
CUT = 141
"""The exit status of a program that SIGPIPE ends (128 + 13)."""
Status = TypeVar("Status", int, int | None)


def with_world_size(arguments: Sequence[str], spelling: str) -> Iterator[str]:
    """Yield the arguments with the number of ranks, given in any of the ways that commands know, as ``spelling=N``.

    The first plain number before all options is the number of ranks, too, unless that is given by name.

    Raises
    ------
    ValueError
        An argument is what other programs call the number of ranks.
    """
    rest = iter(arguments)
    plain_allowed = not any(argument.partition("=")[0] in _ALIASES for argument in arguments)
    for argument in rest:
        key, equals, value = argument.partition("=")
        plain = plain_allowed and argument.isdecimal()
        plain_allowed = plain_allowed and not plain and argument[:1] != "-"
        if key in _ALIASES:
            yield f"{spelling}={value if equals or key[0] != '-' else next(rest, '')}"
        elif plain:
            yield f"{spelling}={argument}"
        elif key.removeprefix("launch.").lstrip("-").replace("-", "_") in MEANT:
            raise ValueError(f"there is no {key}; the number of ranks is given as world_size=8")
        else:
            yield argument
            if argument == "--option":  # its value is an option of a topology
                yield from itertools.islice(rest, 1)


class Parser(argparse.ArgumentParser):
    """A parser that takes ``world_size=N``, and reports a wrong command line in one line."""

    spelling = _FLAG  # of the number of ranks, among the parser's own arguments

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        try:
            written = with_world_size(sys.argv[1:] if args is None else args, self.spelling)
            return super().parse_args(list(written), namespace)
        except ValueError as error:
            self.error(str(error))

    def format_help(self) -> str:
        """Return the usage and what each argument is, the number of ranks as it is written."""
        written = re.sub(rf"{_FLAG}[ =](\w+)  ", r"world_size=\1    ", super().format_help())  # columns stay aligned
        return re.sub(rf"{_FLAG}[ =](\w+)", r"world_size=\1", written)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and the message."""
        written = "world_size=N" if "required: " in message else "world_size"
        self.exit(2, f"{self.prog}: error: {message.replace(_FLAG, written)}\n")


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
