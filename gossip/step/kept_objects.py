"""Objects beside a model whose state is a function of its training: schedulers, averages over time, a GradScaler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard


class Stateful(Protocol):
    """An object with a state: a scheduler, a GradScaler, a sampler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


def is_stateful(part: Any) -> TypeGuard[Stateful]:
    """Return whether ``part`` has ``state_dict()`` and ``load_state_dict()``."""
    is_one = not isinstance(part, type)
    return is_one and all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict"))


class KeptObjects(dict[str, Stateful]):
    """The objects that a model keeps, by name."""

    def add(self, objects: Mapping[str, Any]) -> None:
        """Keep these objects, too.

        Raises
        ------
        TypeError
            An object has no state; the text names it.
        """
        for name, kept in objects.items():
            if not is_stateful(kept):
                raise TypeError(
                    f"keep({name}=...) takes an object with state_dict() and load_state_dict(), got a "
                    f"{kept.__name__ if isinstance(kept, type) else type(kept).__name__}; pass plain data to "
                    "gossip.save by name"
                )
        self.update(objects)

    def with_parts(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the kept objects and what a call has passed besides, by name.

        Raises
        ------
        ValueError
            A name stands for both.
        """
        for name in parts:
            if name in self:
                raise ValueError(
                    f"{name} was passed, but the model saves and loads what it keeps under that name "
                    f"(model.keep({name}=...)); leave it out"
                )
        return {**self, **parts}


class KeepsObjects:
    """A model that keeps objects."""

    _kept: KeptObjects

    def keep(self, /, **objects: Stateful) -> None:
        """Keep what lives beside the model and depends on its training: schedulers, an EMA of the weights. Local.

        :func:`gossip.save` and :func:`gossip.load` include these objects. A rank that joins a training, or comes back,
        loads at once what the rank whose state it takes has under these names: call it on every rank with the same
        names, after construction and before the first step. An object of the same name is replaced.

        A rank that joins also takes the options of the optimizers' parameter groups anew, since constructing a
        scheduler changes learning rates; they and the states are those of the step that it makes first.

        Parameters
        ----------
        **objects
            Objects with ``state_dict()`` and ``load_state_dict()``, whose states are plain data, by name.

        Raises
        ------
        TypeError
            An object has no state.
        """
        self._kept.add(objects)
