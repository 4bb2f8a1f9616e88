"""Meshes of several members in one process."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch

from gossip.elastic.connections.mesh import Mesh
from gossip.elastic.connections.peer_connection import Identity, Key, Kind

SECRET = b"s" * 32
TIMEOUT = timedelta(seconds=60)
"""As long as anything here may take on a busy machine."""


@contextlib.contextmanager
def meshes(number: int, **options: Any) -> Iterator[list[Mesh]]:
    """Within the block there are so many members, which are not connected yet."""
    with contextlib.ExitStack() as stack:
        made = [Mesh(Identity(SECRET, member, **options), "127.0.0.1", TIMEOUT) for member in range(number)]
        for mesh in made:
            stack.callback(mesh.close)
        yield made


@contextlib.contextmanager
def connected(number: int) -> Iterator[list[Mesh]]:
    """Within the block so many members are connected."""
    with meshes(number) as made:
        connect(made)
        yield made


def connect(made: list[Mesh], addresses: Mapping[int, Mapping[int, tuple[str, int]]] | None = None) -> None:
    """Connect them all; ``addresses`` says by caller where it finds some of the others."""
    everyone, others = {mesh.member: mesh.address for mesh in made}, addresses or {}
    with ThreadPoolExecutor(len(made)) as pool:
        list(pool.map(lambda mesh: mesh.connect(everyone | dict(others.get(mesh.member, {}))), made))


def await_that(mesh: Mesh, condition: Callable[[], object]) -> None:
    """Wait until the condition holds, which need not be a change that the mesh tells of."""
    with mesh.changed:
        while not condition():
            mesh.changed.wait(0.01)


def await_loss(mesh: Mesh, member: int) -> str:
    """Wait until a member is lost, and return why."""
    await_that(mesh, lambda: member in mesh.lost)
    return mesh.lost[member]


def await_frame(mesh: Mesh, member: int, key: Key) -> torch.Tensor:
    await_that(mesh, lambda: mesh.has(member, key) or member in mesh.lost)
    payload = mesh.take(member, key)
    assert payload is not None, mesh.lost
    return payload


def message(step: int, bucket: int = 0) -> Key:
    return Key(Kind.MESSAGE, step, bucket)
