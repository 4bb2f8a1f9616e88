"""Which ranks gossip, over which backends, and how a communicator among some of them is created."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gossip.communication.authenticated_store import AuthenticatedStore
from gossip.communication.host.tcp_options import open_sockets
from gossip.private_torch import default_store, known_groups

Group = Any
"""A ``ProcessGroup`` or a backend such as ``ProcessGroupGloo``; both have allreduce, broadcast, allgather, send, recv.

The functions of ``torch.distributed`` refuse the latter.
"""


@dataclass(frozen=True)
class Membership:
    """The processes that gossip with each other."""

    ranks: tuple[int, ...]  # in the default process group, by their rank here
    rank: int  # the place of this process among them
    backends: dict[str, str]  # by type of device
    group: dist.ProcessGroup  # the one that was passed, or the default one
    is_given: bool  # whether one was passed

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None) -> Membership:
        """Return the members of ``process_group``; None stands for the default group. Local.

        Raises
        ------
        ValueError
            This rank is not a member, or the group is not one of ``torch.distributed``'s.
        """
        outside: object = dist.GroupMember.NON_GROUP_MEMBER
        if process_group is not None and process_group == outside:
            raise ValueError(
                f"rank {dist.get_rank()} of the default process group is not a member of process_group; construct the "
                "model on the group's members only"
            )
        group = dist.group.WORLD if process_group is None else process_group
        if not isinstance(group, dist.ProcessGroup) or group not in known_groups():
            raise ValueError(
                f"process_group must be a group that torch.distributed.new_group returned and that has not been "
                f"destroyed, got {process_group!r}"
            )
        config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl", even if one name stands for all devices
        return cls(
            ranks=tuple(dist.get_process_group_ranks(group)),
            rank=dist.get_rank(group),
            backends=dict(item.split(":", 1) for item in config.split(",")),
            group=group,
            is_given=process_group is not None,
        )

    @property
    def is_gloo(self) -> bool:
        """Whether gloo serves all devices; then only their members take part in creating communicators."""
        return set(self.backends.values()) == {"gloo"}

    @property
    def has_host_path(self) -> bool:
        """Whether gloo serves CPUs, so that messages of other devices can be carried in host memory."""
        return self.backends.get("cpu") == "gloo"

    @property
    def can_split(self) -> bool:
        """Whether communicators of some of the members can be created; not within a group that is used directly."""
        return self.is_gloo or not self.is_given

    @property
    def backend_name(self) -> str:
        """The name of the backend, or the names for each type of device, for people to read."""
        names = list(dict.fromkeys(self.backends.values()))
        return names[0] if len(names) == 1 else ", ".join(f"{name} ({kind})" for kind, name in self.backends.items())

    def store(self) -> dist.Store | None:
        """Return the keys of the next world over these members, equal on every member; None for MPI. Local.

        Worlds are distinguished by the group, its members and the number of earlier worlds over them in this process: a
        process that belongs to several sub-groups counts each separately.
        """
        if "mpi" in self.backends.values():
            return None
        identity = f"{self.group.group_name} {self.ranks}"
        number = _num_worlds[identity]
        _num_worlds[identity] += 1
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        return dist.PrefixStore(f"gossip/{digest}/{number}", default_store())


_num_worlds: Counter[str] = Counter()  # never reset: a store may outlive the process group


def gloo_group(store: dist.Store, name: str, place: int, size: int, timeout: timedelta) -> Group:
    """Create a gloo communicator that torch's registry does not know. Collective among its members only.

    Both ways of ``new_group`` are worse: one is collective over all processes, and the other hangs if processes hold
    different numbers of groups (pytorch #189073).
    """
    return dist.ProcessGroupGloo(dist.PrefixStore(name, store), place, size, timeout)


def own_connection(store: dist.Store) -> dist.Store:
    """Return the same keys over a separate connection, if the store has connections. Local.

    The default connection is locked for as long as somebody waits in it: a communicator that cannot be created blocks
    it until its time-out, which is just when the notes of arrivals are needed.
    """
    if isinstance(innermost(store), dist.TCPStore) and hasattr(store, "clone"):
        clone: dist.Store = store.clone()
        return clone
    return store


def innermost(store: dist.Store) -> dist.Store:
    """Return the store below all prefixes. Local."""
    while isinstance(store, dist.PrefixStore | AuthenticatedStore):
        store = store.underlying_store
    return store


def is_served_here(store: dist.Store) -> bool:
    """Return whether this process listens on the store's port; False if its open files cannot be listed. Local."""
    server = innermost(store)
    return isinstance(server, dist.TCPStore) and any(_listens(number, server.port) for number, _ in open_sockets())


def _listens(number: int, port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as shared:  # it may be closed meanwhile
        is_internet = shared.family in (socket.AF_INET, socket.AF_INET6)
        is_listening = shared.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(is_listening) and is_internet and shared.getsockname()[1] == port
    return False
