"""The command ``gossip store``: a key-value store that outlives the ranks of a training, which meet there."""

import argparse
import signal
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta

from gossip.communication.authenticated_store import VARIABLE as KEY
from gossip.communication.authenticated_store import derived, training_key
from gossip.launching.rendezvous import GROUPS, STORE, listen, serve

PORT = 29400
_DESCRIPTION = f"""\
Serve the key-value store in which the ranks of a training meet, until it is ended (Ctrl-C, SIGTERM).

Ranks that are started with {STORE}=HOST:PORT and {GROUPS}=N train together once N are there; whoever comes
later, or comes back, joins them. Ranks need the store when they begin, and when one is lost, leaves or joins; in
between they train without it. Trainings that use it at the same time, or one after the other, have different names:
{STORE}=HOST:PORT/NAME."""


def main(arguments: Sequence[str]) -> int:
    """Serve a store until a signal ends this process; return the exit status."""
    parser = argparse.ArgumentParser(
        "gossip store", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"default: {PORT}; 0 takes a free one")
    port = parser.parse_args(arguments).port
    if not 0 <= port < 2**16:
        parser.error(f"--port must be from 0 to 65535, got {port}")
    try:
        key = training_key()
        listener = listen(port)
    except (OSError, ValueError) as error:
        why: object = error
        if isinstance(error, OSError):
            why = f"port {port} cannot be used: {error.strerror}; choose another one with --port, or 0 for a free one"
        print(f"error: {why}", file=sys.stderr)
        return 2
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # the store's threads, which begin later, leave them to this one
    port = listener.getsockname()[1]
    store = serve("localhost", listener, timedelta(seconds=60))
    print(_text(f"{socket.gethostname()}:{port}", key), flush=True)
    signal.sigwait(ends)
    del store
    return 0


def _text(address: str, key: bytes | None) -> str:
    who = f"everybody who reaches this port; with {KEY} set to a key here and on all ranks, only those who have it"
    if key is not None:
        who = f"those who have the key of {KEY} (fingerprint {derived(key, 'fingerprint')[:4].hex()})"
    return (
        f"gossip store at {address}, or another address of this machine\n"
        f"join with: {STORE}={address} {GROUPS}=N torchrun --nproc-per-node 1 --max-restarts 3 train.py\n"
        f"who may join: {who}"
    )
