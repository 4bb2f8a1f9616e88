"""A key-value store in which values carry codes under a key that is not in the store, and the key of a training."""

from __future__ import annotations

import hmac
import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gossip.errors import ExchangeError

VARIABLE = "GOSSIP_KEY"
_LEAST_CHARACTERS = 32
_DIGEST = "sha256"
_MARK = b"authenticated "
_TAG_CHARACTERS = 64


class NotGenuine(ExchangeError):
    """The store holds what no rank with this key has written."""


def training_key() -> bytes | None:
    """Return the key of this process's trainings, or None. Local.

    The variable ``GOSSIP_KEY`` holds it, or the path of a file that does.

    Raises
    ------
    ValueError
        The file cannot be read, or the key is too short.
    """
    given = os.environ.get(VARIABLE)
    if given is None:
        return None
    if "/" in given or os.path.isfile(given):
        try:
            given = Path(given).read_text()
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{VARIABLE} names a file, as it contains a slash, but cannot be read ({type(error).__name__}); "
                "name the file that holds the key, or set the variable to the key itself, without a slash"
            ) from error
    key = given.strip()
    if len(key) < _LEAST_CHARACTERS:
        raise ValueError(
            f"{VARIABLE} must hold at least {_LEAST_CHARACTERS} characters that nobody can guess, or name a file that "
            f"does, got {len(key)}; make one with `openssl rand -hex 32`"
        )
    return key.encode()


def derived(key: bytes, purpose: str) -> bytes:
    """Return a key for one purpose."""
    return hmac.digest(key, purpose.encode(), _DIGEST)


class AuthenticatedStore(dist.Store):
    """A store of which each value carries an authentication code, over the name of its key and the value.

    Whoever reaches the store without the key can delete values, or put back older ones of the same key, and so stop the
    training, but write none. Sums (:meth:`add`) carry no code: nothing may be concluded from them.

    Parameters
    ----------
    store : Store
        Where the values are kept.
    key : bytes
        The key, which every reader and writer has.
    name : str
        What distinguishes the keys of this store from equal ones for other purposes.
    """

    def __init__(self, store: dist.Store, key: bytes, name: str) -> None:
        super().__init__()
        self.underlying_store: Any = store
        self.key, self.name = key, name

    def clone(self) -> AuthenticatedStore:
        """Return the same keys over a separate connection."""
        return AuthenticatedStore(self.underlying_store.clone(), self.key, self.name)

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self.underlying_store.set(key, self._authenticated(key, value))

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it; raise NotGenuine if no rank has written it, as all that read do."""
        return self._opened(key, self.underlying_store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values, and return them."""
        return [self._opened(*one) for one in zip(keys, self.underlying_store.multi_get(keys), strict=True)]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a value unless there is one, and return what is there; ``expected`` is empty."""
        assert expected == ""
        return self._opened(key, self.underlying_store.compare_set(key, "", self._authenticated(key, desired)))

    def check(self, keys: list[str]) -> bool:
        """Return whether all of these keys have values, genuine or not."""
        return bool(self.underlying_store.check(keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return the sum, which is not authenticated."""
        return int(self.underlying_store.add(key, amount))

    def has_extended_api(self) -> bool:
        """Return whether several values can be read in one message."""
        return bool(self.underlying_store.has_extended_api())

    def _authenticated(self, key: str, value: str) -> str:
        return f"{_MARK.decode()}{self._tag(key, value.encode())}{value}"

    def _opened(self, key: str, found: bytes) -> bytes:
        start = len(_MARK) + _TAG_CHARACTERS
        value = found[start:]
        if not hmac.compare_digest(found[:start], _MARK + self._tag(key, value).encode()):
            raise NotGenuine(
                f"the key-value store has a value of {key!r} that no rank with this {VARIABLE} has written: a rank has "
                "another one or none, or somebody else writes to the store"
            )
        return value

    def _tag(self, key: str, value: bytes) -> str:
        return hmac.new(self.key, json.dumps([self.name, key]).encode() + value, _DIGEST).hexdigest()


def guarded(store: dist.Store, key: bytes | None, name: str) -> dist.Store:
    """Return a store whose values are authenticated under the key of a training, if there is one. Local."""
    return store if key is None else AuthenticatedStore(store, derived(key, "store"), name)


def under(store: dist.Store, prefix: str) -> dist.Store:
    """Return the keys of a store that begin with a prefix, authenticated like the others. Local."""
    if isinstance(store, AuthenticatedStore):
        return AuthenticatedStore(dist.PrefixStore(prefix, store.underlying_store), store.key, f"{store.name}/{prefix}")
    return dist.PrefixStore(prefix, store)


def read(found: bytes) -> Any:
    """Return the plain data that a store without a key has; raise NotGenuine if others have authenticated them."""
    if found.startswith(_MARK):
        raise NotGenuine(f"the other ranks have a {VARIABLE}, and this one has none; set it to the same on all ranks")
    return json.loads(found)
