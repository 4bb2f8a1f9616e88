"""When an algorithm needs the messages in flight."""

from __future__ import annotations

from typing import Literal

from gossip.algorithms.base import Algorithm

Form = Literal["awc", "atc"]
"""Adapt while communicating: at the next update. Adapt then combine: before the next forward pass."""


class WithForm(Algorithm):
    """Algorithms that await an exchange at the next update or, if the user chooses, before the next forward pass."""

    def __init__(self, form: Form = "awc") -> None:
        if form not in ("awc", "atc"):
            raise ValueError(
                f'form must be "awc" (adapt while communicating) or "atc" (adapt then combine), got {form!r}'
            )
        self.form: Form = form
        self.before_forward = form == "atc"

    def describe(self) -> str:
        return f"{type(self).__name__}({': '.join(filter(None, (self.form, self._described_constants())))})"
