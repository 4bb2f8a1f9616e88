"""One loss scale on all ranks, although each of them overflows by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gossip.communication.flags import Flag


class SharedScaler:
    """A :class:`torch.amp.GradScaler` whose scale follows from the overflows of all ranks.

    A rank whose gradients overflow skips its own update but exchanges as ever. That it did is told to all others in the
    background; the scale changes one step later, by the same factor everywhere.

    Parameters
    ----------
    scaler : GradScaler
        The one that the loss is scaled with.
    flag : Flag
    """

    def __init__(self, scaler: GradScaler, flag: Flag) -> None:
        self.scaler = scaler
        self.flag = flag

    def unscale_(self, optimizers: Sequence[Optimizer]) -> bool:
        """Divide the gradients by the scale; whether any of them is not finite on this rank."""
        if self.scaler._scale is None:  # nothing has been scaled yet: this rank was idle until now
            self.scaler.scale(torch.zeros((), device=self.scaler._device))
        found = False
        for optimizer in optimizers:
            self.scaler.unscale_(optimizer)
            found |= any(bool(flag) for flag in self.scaler._found_inf_per_device(optimizer).values())
        return found

    def settle(self, optimizers: Sequence[Optimizer], overflowed: bool) -> None:
        """Tell the others what happened here, and the scaler what happened anywhere in the step before."""
        before = self.flag.wait()
        self.flag.say(overflowed)
        verdict = torch.tensor(float(bool(before)), device=self.scaler._device)
        for optimizer in optimizers:
            # GradScaler.update() decides by these; torch's own sharded scaler sets them too.
            self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {verdict.device: verdict}
