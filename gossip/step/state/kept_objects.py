"""Objects beside a model whose state is a function of its training: schedulers, averages over time, a GradScaler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from loguru import logger
from torch.optim import Optimizer

from gossip.errors import GossipError, reason
from gossip.parameters.serializable_state import HasState, copied, is_serializable, state_of, to_serializable


class Stateful(HasState, Protocol):
    """An object with a state: a scheduler, a GradScaler, a sampler."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


def is_stateful(part: Any) -> TypeGuard[Stateful]:
    """Return whether ``part`` has ``state_dict()`` and ``load_state_dict()``."""
    is_one = not isinstance(part, type)
    return is_one and all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict"))


class KeptObjects(dict[str, Stateful]):
    """The objects that a model keeps, by name."""

    given: GivenObjects | None = None
    """What the rank keeps whose state this one has taken, until this rank makes its first step."""
    wait_for_written: Callable[[], None] | None = None
    """Waits until the checkpoint is complete that is written in the background."""

    newest_saved: int | None = None
    """The step of the newest checkpoint that is complete, on the rank that completes it."""

    def wait_for_save(self) -> None:
        """Wait for the checkpoint that is written in the background; a CheckpointError says that it failed. Local."""
        wait, self.wait_for_written = self.wait_for_written, None
        if wait is not None:
            wait()

    def add(self, objects: Mapping[str, Any]) -> None:
        """Keep these objects, too."""
        for name, kept in objects.items():
            if not is_stateful(kept):
                raise TypeError(
                    f"keep({name}=...) takes an object with state_dict() and load_state_dict(), got a "
                    f"{kept.__name__ if isinstance(kept, type) else type(kept).__name__}; pass plain data to "
                    "gossip.save by name"
                )
        if self.given is not None:
            self.given.load(objects)
        self.update(objects)

    def states(self) -> dict[str, dict[str, Any]]:
        """Return for a rank that joins the state of each object; an error, with a warning, in place of one. Local."""
        found: dict[str, dict[str, Any]] = {}
        for name, kept in self.items():
            where = f"{name}.state_dict()"
            try:
                found[name] = {"state": to_serializable(state_of(kept, where), where)}
            except Exception as error:
                found[name] = {"error": reason(error)}
                logger.warning("no rank that joins can have what is kept as {!r}: {}", name, reason(error))
        return found

    def end_joining(self) -> None:
        """Begin to train, with everything that the rank keeps whose state this one has taken. Local."""
        given, self.given = self.given, None
        if given is not None:
            given.check_complete(self)

    def with_parts(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the kept objects and what a call has passed besides, by name."""
        for name in parts:
            if name in self:
                raise ValueError(
                    f"{name} was passed, but the model saves and loads what it keeps under that name "
                    f"(model.keep({name}=...)); leave it out"
                )
        return {**self, **parts}


@dataclass(frozen=True, eq=False)
class GivenObjects:
    """What a rank that joins has been given: the states of kept objects, and the options of the optimizers' groups."""

    _who: str
    _states: Mapping[str, Mapping[str, Any]]
    _options: Sequence[Sequence[Mapping[str, Any]]]
    _optimizers: Sequence[Optimizer]

    def load(self, objects: Mapping[str, Stateful]) -> None:
        """Load the states of these objects, and the options, which constructing a scheduler changes. Local."""
        for name, kept in objects.items():
            entry = self._states.get(name, {"error": f"it keeps {', '.join(map(repr, self._states)) or 'nothing'}"})
            if "error" in entry:
                raise GossipError(
                    f"{self._who} has no state for keep({name}=...): {entry['error']}; keep the same objects on every "
                    "rank, before its first step"
                )
            kept.load_state_dict(copied(entry["state"]))  # another object may take the place of this one
        for optimizer, groups in zip(self._optimizers, self._options, strict=True):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                for key, value in options.items():
                    if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                        group[key].copy_(value)
                    else:
                        group[key] = copied(value)

    def check_complete(self, kept: Mapping[str, Stateful]) -> None:
        """Raise GossipError if there is a state that no object has loaded."""
        if missing := [name for name in self._states if name not in kept]:
            raise GossipError(
                f"{self._who} keeps {', '.join(map(repr, missing))}, which this rank does not; call "
                f"model.keep({missing[0]}=...) before the first step, as on the others"
            )


def group_options(optimizers: Sequence[Optimizer]) -> list[list[dict[str, Any]]]:
    """Return the options of parameter groups that are plain data, by optimizer and group. Local."""
    return [
        [
            {key: value for key, value in group.items() if key != "params" and is_serializable(value)}
            for group in optimizer.param_groups
        ]
        for optimizer in optimizers
    ]


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
        GossipError
            This rank joins, and the rank whose state it takes keeps nothing under this name, or could not give it.
        """
        self._kept.add(objects)
