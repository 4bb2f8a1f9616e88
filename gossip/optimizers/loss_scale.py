"""One loss scale on all ranks, although each rank overflows independently."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gossip.communication.flags import Flag


class SharedScaler:
    """A :class:`torch.amp.GradScaler` whose scale depends on the overflows of all ranks.

    A rank whose gradients overflow skips its own update but exchanges as usual. The overflow is reported to all others
    in the background; the scale changes one step later, by the same factor everywhere.
    """

    def __init__(self, scaler: GradScaler, flag: Flag, *, steps_in_backward: bool) -> None:
        self.scaler = scaler
        self.flag = flag
        self._verdict = False  # of the newest step: whether any rank had overflowed in the one before
        if steps_in_backward:
            for name in _MADE_IN_BACKWARD:
                setattr(scaler, name, functools.partial(_refuse, name))

    def unscale_(self, optimizers: Sequence[Optimizer], others: Sequence[torch.Tensor] = ()) -> bool:
        """Divide the gradients by the scale, and return whether any of them is not finite on this rank.

        ``others`` are the gradients of parameters that no optimizer holds: they are part of the norm.
        """
        if self.scaler._scale is None:  # nothing has been scaled yet, as this rank has been idle
            self.scaler.scale(torch.zeros((), device=self.scaler._device))
        found = False
        for optimizer in optimizers:
            type(self.scaler).unscale_(self.scaler, optimizer)
            found |= any(bool(flag) for flag in self.scaler._found_inf_per_device(optimizer).values())
        for gradient in others:
            found |= not bool(gradient.mul_(1 / self.scaler.get_scale()).isfinite().all())
        return found

    def settle(self, optimizers: Sequence[Optimizer], overflowed: bool) -> None:
        """Report this rank's overflow to the others, and any rank's overflow in the previous step to the scaler."""
        before = bool(self.flag.wait())
        self.flag.vote(overflowed)
        self._rule(optimizers, before)

    def _rule(self, optimizers: Sequence[Optimizer], verdict: bool) -> None:
        self._verdict = verdict
        found = torch.tensor(float(verdict), device=self.scaler._device)
        for optimizer in optimizers:
            # GradScaler.update() decides by these; torch's own sharded scaler sets them, too.
            self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {found.device: found}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler, and what the ranks know of overflows. Waits for their latest words."""
        return {"scaler": self.scaler.state_dict(), "overflow": self.flag.wait(), "verdict": self._verdict}

    def load_state_dict(self, state: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> None:
        """Continue as the rank whose state it is. Local."""
        self.scaler.load_state_dict(state["scaler"])
        self.flag.restore(state["overflow"])
        self._rule(optimizers, state["verdict"])

    def update(self) -> None:
        """Let the scaler update its scale."""
        type(self.scaler).update(self.scaler)

    def close(self) -> None:
        """End the reports, and restore the scaler's own methods. Local."""
        self.flag.close()
        for name in _MADE_IN_BACKWARD:
            self.scaler.__dict__.pop(name, None)


_MADE_IN_BACKWARD = ("unscale_", "update")


def _refuse(name: str, *_: object, **__: object) -> NoReturn:
    raise ValueError(
        f"scaler.{name}() cannot work here, because gradients are unscaled and the scale is updated inside backward; "
        "leave it out and call only scaler.scale(loss).backward(), or wrap the module with step_in_backward=False"
    )
