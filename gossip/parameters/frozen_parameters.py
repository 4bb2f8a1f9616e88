"""Frozen parameters: equal on all ranks, so that they are not sent until they change."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from gossip.communication.world import World
from gossip.errors import ManifestError, warn_user
from gossip.parameters.buckets import check_unfrozen, describe_tensor, is_mixable
from gossip.parameters.digests import bytes_of, digest_of
from gossip.parameters.manifest import compare_manifests, first_difference

_NUM_SAMPLES = 16
_MAX_NAMES_LISTED = 3


class FrozenParameters:
    """The parameters that required no gradient when the module was wrapped, and have not been unfrozen since.

    They start equal on all ranks, and stay equal as long as nobody writes to them: no bucket holds them and no message
    carries them. A rank that has written to one reports this at the next collective operation (a checkpoint, a global
    average), and only then are its values compared. If they differ, the parameter is averaged with the others from then
    on, or, if its dtype cannot be mixed, rank 0's values are taken.

    A write is detected by the tensor's version counter, by its memory (``p.data = ...``) and, because a write through
    ``p.data`` does not change the counter, by 16 of its values.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], world: World) -> None:
        self._parameters = dict(parameters)
        self._world = world
        self._seen = {name: _Seen(parameter) for name, parameter in self._parameters.items()}
        self._hooks: dict[str, RemovableHandle] = {}
        self._has_warned = False
        self.differing: list[str] = []  # between ranks, by the newest comparison

    def __len__(self) -> int:
        return len(self._parameters)

    @property
    def num_bytes(self) -> int:
        """The size of all values in bytes."""
        return sum(parameter.nbytes for parameter in self._parameters.values())

    # ------------------------------------------------------------------ unfreezing

    def unfrozen(self) -> list[str]:
        """Return the names of the parameters that now require a gradient. Local."""
        return [name for name, parameter in self._parameters.items() if parameter.requires_grad]

    def hook(self, on_gradient: Callable[[torch.Tensor], None]) -> None:
        """Call ``on_gradient`` for gradients of unfrozen parameters, so that a step is made for them. Local."""
        for name in self.unfrozen():
            if name not in self._hooks:
                self._hooks[name] = self._parameters[name].register_post_accumulate_grad_hook(on_gradient)

    def agree_to_unfreeze(self, names: Sequence[str], step: int) -> None:
        """Compare the names, and the values that somebody has written to. Collective.

        Raises ManifestError: the ranks have unfrozen different parameters; raised on every rank.
        """
        advice = "unfreeze the same parameters on every rank before the same step"
        what = f"step {step}: comparing the parameters that were unfrozen ({advice})"
        compare_manifests(self._world, {"unfrozen": ", ".join(map(repr, names))}, what, advice)
        self.compare()

    def release(self, names: Sequence[str]) -> list[tuple[str, nn.Parameter]]:
        """Remove those of these parameters that are frozen and return them; they are exchanged from now on. Local.

        Raises GossipError: one cannot be mixed; nothing is removed.
        """
        names = [name for name in self._parameters if name in names]
        check_unfrozen({name: self._parameters[name] for name in names})
        for name in names:
            if name in self._hooks:
                self._hooks.pop(name).remove()
            del self._seen[name]
        self.differing = [name for name in self.differing if name not in names]
        return [(name, self._parameters.pop(name)) for name in names]

    # ------------------------------------------------------------------ edits

    @torch.no_grad()
    def compare(self) -> None:
        """Compare the parameters that some rank has written to since the last time. Collective.

        Raises ManifestError: a parameter has another dtype or shape on some rank; raised on every rank.
        """
        if not self._parameters or self._world.world_size == 1:
            return
        written = [name for name, seen in self._seen.items() if seen.was_written(self._parameters[name])]
        what = "comparing frozen parameters"
        everyone = self._world.gather_json(written, what)
        suspects = {name for names in everyone for name in names}
        if not suspects:
            return
        entries = {name: self._describe(name) for name in self._parameters if name in suspects}
        found = self._world.gather_json(entries, what)
        if other := first_difference([{name: kind for name, (kind, _) in each.items()} for each in found]):
            raise ManifestError(
                f"frozen parameter {other.key!r} is {other.first} on rank 0, but {other.other} on rank {other.number}; "
                "convert it equally on every rank"
            )
        different = {name for name in entries if len({by_name[name][1] for by_name in found}) > 1}
        self.differing = [
            name for name in self._parameters if name in different or (name in self.differing and name not in suspects)
        ]
        for name in entries:
            self._seen[name] = _Seen(self._parameters[name])
        if self.differing:
            self._warn(everyone)

    def _describe(self, name: str) -> tuple[str, str]:
        parameter = self._parameters[name].detach()
        return f"{describe_tensor(parameter)}, strides {list(parameter.stride())}", digest_of([parameter]).hex()

    def _warn(self, written: Sequence[Sequence[str]]) -> None:
        if self._has_warned or self._world.rank != 0:
            return
        self._has_warned = True
        ranks = ", ".join(str(rank) for rank, names in enumerate(written) if names)
        hidden = len(self.differing) - _MAX_NAMES_LISTED
        listed = ", ".join(map(repr, self.differing[:_MAX_NAMES_LISTED]))
        more = f" and {hidden} more" * (hidden > 0)
        warn_user(
            f"frozen parameters were written to on ranks {ranks} and now differ between the ranks: {listed}{more}; "
            "averages include them, but steps do not exchange them. To have them mixed in every step, let them require "
            'gradients, or make them buffers and pass buffers="average"'
        )

    # ------------------------------------------------------------------ averages

    def names_of_equal(self) -> set[str]:
        """Return the names of the parameters that do not differ between ranks."""
        return self._parameters.keys() - set(self.differing)

    def equal_values(self) -> Iterator[torch.Tensor]:
        """Return the values of the parameters that do not differ between ranks and that could be mixed."""
        equal = (parameter for name, parameter in self._parameters.items() if name not in self.differing)
        return (parameter.detach() for parameter in equal if is_mixable(parameter))

    def differing_values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return name and values of those that differ, to be averaged in place, see :meth:`note_differing`."""
        return ((name, self._parameters[name].detach()) for name in self.differing)

    def note_differing(self) -> None:
        """Note that all ranks together have written to those that differ, which is not an edit. Local."""
        for name in self.differing:
            self._seen[name] = _Seen(self._parameters[name])

    def are_equal(self) -> None:
        """Note that all parameters were permanently averaged. Local."""
        self.differing = []

    def snapshot(self) -> Callable[[], None]:
        """Copy those that differ, and return a function that restores them exactly. Local."""
        values = {name: self._parameters[name].detach().clone() for name in self.differing}

        @torch.no_grad()
        def put_back() -> None:
            for name, own in values.items():
                self._parameters[name].copy_(own)
            self.note_differing()

        return put_back

    # ------------------------------------------------------------------ checkpoints and closing

    def state_dict(self) -> dict[str, Any]:
        """Return which parameters differ between ranks."""
        return {"differing": list(self.differing)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Note that values were restored that had been compared before they were saved, or, with None, had not."""
        if state is not None:
            self.differing = [name for name in state["differing"] if name in self._parameters]
            self._seen = {name: _Seen(parameter) for name, parameter in self._parameters.items()}

    def close(self) -> None:
        """Remove the hooks. Local."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()


class _Seen:
    """The appearance of a parameter when its values were known to be equal on all ranks."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._version = parameter._version
        self._address = parameter.data_ptr()
        self._storage = StorageWeakRef(parameter.untyped_storage())
        self._sample = _sample(parameter)

    def was_written(self, parameter: nn.Parameter) -> bool:
        """Return whether anything may have changed since."""
        return (
            parameter._version != self._version
            or parameter.data_ptr() != self._address
            or self._storage.expired()  # other memory may have the same address
            or not torch.equal(_sample(parameter), self._sample)
        )


def _sample(parameter: nn.Parameter) -> torch.Tensor:
    """Return some of the values, evenly spread, as bytes."""
    values = parameter.detach()
    if values.numel() <= _NUM_SAMPLES:
        return bytes_of(values).clone()
    places = torch.linspace(0, values.numel() - 1, _NUM_SAMPLES, dtype=torch.float64, device=values.device).long()
    return bytes_of(values[torch.unravel_index(places, values.shape)])
