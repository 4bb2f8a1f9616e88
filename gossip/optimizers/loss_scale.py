"""One loss scale on all ranks, although each rank overflows independently."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gossip.communication.flags import Flag


class SharedScaler:
    """A :class:`torch.amp.GradScaler` whose scale depends on the overflows of all ranks.

    A rank whose gradients overflow skips its own update but exchanges as usual. The overflow is reported to all others
    in the background; the scale changes one step later, by the same factor everywhere.

    Parameters
    ----------
    scaler : GradScaler
        The scaler that scales the loss.
    flag : Flag
        Reports overflows to all ranks.
    """

    def __init__(self, scaler: GradScaler, flag: Flag) -> None:
        self.scaler = scaler
        self.flag = flag

    def unscale_(self, optimizers: Sequence[Optimizer]) -> bool:
        """Divide the gradients by the scale, and return whether any of them is not finite on this rank."""
        if self.scaler._scale is None:  # nothing has been scaled yet, as this rank has been idle
            self.scaler.scale(torch.zeros((), device=self.scaler._device))
        found = False
        for optimizer in optimizers:
            self.scaler.unscale_(optimizer)
            found |= any(bool(flag) for flag in self.scaler._found_inf_per_device(optimizer).values())
        return found

    def settle(self, optimizers: Sequence[Optimizer], overflowed: bool) -> None:
        """Report this rank's overflow to the others, and any rank's overflow in the previous step to the scaler."""
        before = self.flag.wait()
        self.flag.say(overflowed)
        verdict = torch.tensor(float(bool(before)), device=self.scaler._device)
        for optimizer in optimizers:
            # GradScaler.update() decides by these; torch's own sharded scaler sets them, too.
            self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {verdict.device: verdict}
