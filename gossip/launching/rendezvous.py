"""How ranks that no common launcher has started find each other: in a key-value store that outlives all of them.

``gossip store`` serves it. Every process that comes takes a number. Once as many have come as are expected, or enough
of them at the time-out, they are the founders of the training: whoever sees that first writes their numbers, once, by
compare-and-set. They make a process group, in the order of their numbers, and train as ranks do that were started
together. Everybody else joins them. If all founders end before their training is announced, or a rank that comes to
join finds that all have ended without completing it, the next attempt begins.

Ranks that hold a replica together, a shard group, have one number: the first of them meets the others for all.
"""

import itertools
import json
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from loguru import logger

from gossip.communication import training_store
from gossip.communication.authenticated_store import guarded, read, training_key
from gossip.communication.liveness import peer_liveness
from gossip.communication.liveness.process_liveness import GONE, Process, own_process, state_of
from gossip.communication.training_store import STORE as STORE
from gossip.errors import ExchangeError, LaunchError, reason

GROUPS = "GOSSIP_GROUPS"
_PAUSE_S = 0.05
_TIMEOUTS_OF_AN_ATTEMPT = 3  # it waits for others, and then for their announcement

_meetings = itertools.count()  # of this process; all ranks meet equally often


@dataclass(frozen=True)
class Rendezvous:
    """Where ranks meet, and how many must be there for their training to begin.

    Attributes
    ----------
    address : str
        Host and port of the store.
    name : str
        What distinguishes the training from others at the same store; may be empty.
    num_groups : int
        How many begin at once; each is one rank, or a shard group.
    least : int
        How many begin at the time-out.
    """

    address: str
    name: str
    num_groups: int
    least: int


def find_rendezvous(environment: Mapping[str, str] = os.environ) -> Rendezvous | None:
    """Return where the environment says that this process meets others; None if ``GOSSIP_STORE`` is not set. Local.

    Raises
    ------
    ValueError
        ``GOSSIP_STORE`` or ``GOSSIP_GROUPS`` is invalid, or the latter is missing.
    """
    if STORE not in environment:
        return None
    where, groups = environment[STORE], environment.get(GROUPS, "")
    found = re.fullmatch(r"([^/]+:\d+)(?:/([\w.-]+))?", where)
    if found is None:
        raise ValueError(
            f"{STORE} must be the host:port of `gossip store`, or host:port/name if several trainings use it (a name "
            f"of letters, digits, _, . and -), got {where!r}"
        )
    numbers = re.fullmatch(r"(?:(\d+):)?(\d+)", groups)
    most = int(numbers[2]) if numbers else 0
    least = int(numbers[1] or most // 2 + 1) if numbers else 0
    if not 1 <= least <= most:
        raise ValueError(
            f"{GROUPS} must be the number of groups with which the training begins, such as 4, or the least and the "
            f"usual number, such as 2:4, got {groups!r}; set it beside {STORE}, the same for all groups"
        )
    return Rendezvous(found[1], found[2] or "", most, least)


class Met(NamedTuple):
    """How this process takes part."""

    store: dist.Store  # the keys of the founders' process group
    rank: int | None  # of this process among those of the founders; None if it joins their training
    num_founders: int  # how many ranks they have


def meet(
    rendezvous: Rendezvous, timeout: timedelta, own: dist.Store | None = None, place: int = 0, size: int = 1
) -> Met:
    """Meet the other ranks, and let the next models of this process found or join their training.

    Collective; returns once the founders are known and, on a rank that joins, once their training is announced.
    ``own`` are keys of the ``size`` ranks of this shard group, in which this one has a ``place``; not needed by one.

    Raises
    ------
    LaunchError
        There is no store, the ranks or the announcement did not come within ``timeout``, or the shard groups of the
        others have another size.
    """
    store = connect(rendezvous.address, timeout)
    outcome = _outcome(rendezvous, store, timeout, size) if place == 0 else {}
    if own is not None:
        own.set("outcome", json.dumps(outcome)) if place == 0 else own.wait(["outcome"], 2 * timeout)
        outcome = json.loads(own.get("outcome"))
    if "failed" in outcome:
        raise LaunchError(outcome["failed"])
    number, prefix = outcome["number"], outcome["prefix"]
    training_store.begin(store, prefix, is_founder=number is not None)
    rank = None if number is None else number * size + place
    return Met(dist.PrefixStore(f"{prefix}group", store), rank, outcome["num_founders"] * size)


def listen(port: int) -> socket.socket:
    """Open a socket that listens on all interfaces; 0 takes a free port. Local."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def serve(host: str, listener: socket.socket, timeout: timedelta) -> dist.TCPStore:
    """Serve a store at the port of a socket that listens, which it takes over. Local."""
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def connect(address: str, timeout: timedelta) -> dist.TCPStore:
    """Connect to the store at an address, host:port. Local."""
    host, _, port = address.rpartition(":")
    try:
        return dist.TCPStore(host.strip("[]"), int(port), is_master=False, timeout=timeout)
    except RuntimeError as error:
        raise LaunchError(f"there is no key-value store at {host}:{port}: {str(error).splitlines()[0]}") from error


def _outcome(rendezvous: Rendezvous, store: dist.Store, timeout: timedelta, size: int) -> dict[str, Any]:
    """Return the place of this process or group among the founders, if it is one, their number, and the prefix."""
    from gossip.elastic.consensus_store import within  # not loaded where no rank can be lost

    meeting = f"gossip/{rendezvous.name}/{next(_meetings)}"
    attempts = (_Attempt(rendezvous, store, f"{meeting}/{number}/", timeout, size) for number in itertools.count())
    try:
        return next(filter(None, (within(_TIMEOUTS_OF_AN_ATTEMPT * timeout, attempt.meet) for attempt in attempts)))
    except (LaunchError, ExchangeError) as error:
        return {"failed": str(error)}
    except RuntimeError as error:  # stores have no specific type of errors
        return {"failed": f"the key-value store at {rendezvous.address} does not reply ({reason(error)})"}


class _Attempt:
    """One attempt to found a training."""

    def __init__(self, rendezvous: Rendezvous, store: dist.Store, prefix: str, timeout: timedelta, size: int) -> None:
        self._prefix, self._size = prefix, size
        self._rendezvous, self._store, self._timeout_s = rendezvous, store, timeout.total_seconds()
        self._keys: Any = guarded(store, training_key(), "")
        self._known: dict[int, Process] = {}

    def meet(self) -> dict[str, Any] | None:
        """Return how this process takes part; None if all of this attempt's ranks have ended."""
        size = read(self._keys.compare_set(f"{self._prefix}group_size", "", json.dumps(self._size)))
        if size != self._size:
            raise LaunchError(
                f"the groups at {self._where} have {size} rank{'s' * (size > 1)} each, and this one has {self._size}; "
                "start as many ranks in every group"
            )
        own = None if self._has("founders") else self._take_number()
        founders = self._await_founders()
        if own in founders:
            if own == founders[0]:
                log = logger.info if len(founders) == self._rendezvous.num_groups else logger.warning
                log("{} of {} groups begin to train; others can join", len(founders), self._rendezvous.num_groups)
        elif not self._is_announced(founders):
            return None
        number = founders.index(own) if own in founders else None
        return {"number": number, "num_founders": len(founders), "prefix": self._prefix}

    def _take_number(self) -> int:
        number = int(self._keys.add(f"{self._prefix}num_processes", 1)) - 1
        host, port = peer_liveness.listen(self._store)
        self._keys.set(f"{self._prefix}process{number}", json.dumps(own_process()._replace(host=host, port=port)))
        return number

    def _await_founders(self) -> list[int]:
        """Return the numbers of the founders; propose those that are there if they are enough."""
        deadline, wanted = time.monotonic() + self._timeout_s, self._rendezvous.num_groups
        while not self._has("founders"):
            present = [
                number for number in range(self._keys.add(f"{self._prefix}num_processes", 0)) if self._is_here(number)
            ]
            is_late = time.monotonic() > deadline
            if len(present) >= wanted or (is_late and len(present) >= self._rendezvous.least):
                self._keys.compare_set(f"{self._prefix}founders", "", json.dumps(present[:wanted]))
            elif is_late:
                raise LaunchError(
                    f"{len(present)} of {GROUPS}={wanted} groups came to {self._where} within {self._timeout_s:g} s, "
                    f"and at least {self._rendezvous.least} are needed to begin; start the others within that time"
                )
            else:
                time.sleep(_PAUSE_S)
        found: list[int] = self._read("founders")
        return found

    def _is_announced(self, founders: list[int]) -> bool:
        """Wait until the founders' training is announced; False if all of them ended before, or all ranks since."""
        key, deadline = training_store.announcement(self._prefix), time.monotonic() + self._timeout_s
        while not self._keys.check([key]):
            if not any(map(self._is_here, founders)):
                self._keys.compare_set(
                    key, "", json.dumps({"failed": "all founders ended before their training began"})
                )
            elif time.monotonic() > deadline:
                raise LaunchError(
                    f"the {len(founders)} founders of the training at {self._where} have not wrapped a model with "
                    f'on_peer_loss="continue" within {self._timeout_s:g} s; if they have ended, let all ranks meet '
                    f"under another name, {STORE}={self._rendezvous.address}/NAME"
                )
            else:
                time.sleep(_PAUSE_S)
        return "failed" not in read(self._keys.get(key)) and not self._has(f"outcome/{training_store.ENDED}")

    def _is_here(self, number: int) -> bool:
        """Whether a process has come, and is not known to have ended."""
        if number not in self._known:
            if not self._has(f"process{number}"):
                return False
            self._known[number] = Process(*self._read(f"process{number}"))
            peer_liveness.connect([self._known[number]])
        process = self._known[number]
        has_ended = peer_liveness.is_gone(process) or peer_liveness.has_refused(process)
        return state_of(process, own_process()) != GONE and not has_ended

    @property
    def _where(self) -> str:
        return f"{STORE}={self._rendezvous.address}" + f"/{self._rendezvous.name}" * bool(self._rendezvous.name)

    def _has(self, key: str) -> bool:
        return bool(self._keys.check([self._prefix + key]))

    def _read(self, key: str) -> Any:
        return read(self._keys.get(self._prefix + key))
