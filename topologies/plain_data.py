"""Recorded options: immutable plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn


class FrozenDict(dict[str, Any]):
    """A dictionary that refuses to change; JSON, copies, pickles and comparisons take it for a dictionary."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a topology and its options are read-only; build another one with other options")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


def frozen(value: Any) -> Any:
    """Return the data with read-only mappings, and tuples for lists."""
    if isinstance(value, Mapping):
        return FrozenDict({key: frozen(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(map(frozen, value))
    return value
