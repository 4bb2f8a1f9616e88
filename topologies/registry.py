"""What users choose by name: topologies, algorithms, compressions."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Functions or classes of one kind by their names; the errors name the kind, such as "topology".

    Examples
    --------
    >>> shapes = Registry[type]("shape", {"circle": complex})
    >>> @shapes.register("square")
    ... class Square: ...
    >>> shapes.available(), shapes.get("square") is Square
    (('circle', 'square'), True)
    >>> shapes.get("squares")
    Traceback (most recent call last):
    ValueError: unknown shape 'squares'. Did you mean 'square'? Available: circle, square
    """

    def __init__(self, kind: str, entries: Mapping[str, T] | None = None) -> None:
        self.kind = kind
        self._entries = dict(entries or {})

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that makes a function or a class available under a name that is not taken."""
        self._check_text(name)

        def decorate(entry: T) -> T:
            if name in self._entries:
                taken = self._entries[name]
                where = f"{taken.__module__}.{getattr(taken, '__qualname__', type(taken).__qualname__)}"
                raise ValueError(f"the {self.kind} name {name!r} is taken by {where}; choose another name")
            self._entries[name] = entry
            return entry

        return decorate

    def available(self) -> tuple[str, ...]:
        """Return all names, sorted."""
        return tuple(sorted(self._entries))

    def get(self, name: str) -> T:
        """Return what is registered under a name; the ValueError for another one lists what exists."""
        self._check_text(name)
        if name in self._entries:
            return self._entries[name]
        nearest = nearest_match(name, self._entries)
        hint = f" Did you mean {nearest!r}?" if nearest else ""
        raise ValueError(f"unknown {self.kind} {name!r}.{hint} Available: {', '.join(self.available())}")

    def _check_text(self, name: object) -> None:
        if not isinstance(name, str):
            raise TypeError(
                f"the name of a {self.kind} must be a str, got {name!r} ({type(name).__name__}); pass one of "
                f"{', '.join(self.available())}"
            )


def nearest_match(name: str, names: Iterable[str]) -> str | None:
    """Return the name that is most like the one given; ``None``: none is."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)), None)
