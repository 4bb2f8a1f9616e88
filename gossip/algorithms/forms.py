"""When an algorithm needs the messages in flight."""

from __future__ import annotations

from typing import Literal

Form = Literal["awc", "atc"]
"""Adapt while communicating: at the next update. Adapt then combine: before the next forward pass."""


def check_form(form: Form) -> Form:
    """Return ``form`` if it is valid.

    Raises
    ------
    ValueError
        ``form`` is neither "awc" nor "atc".
    """
    if form not in ("awc", "atc"):
        raise ValueError(f'form must be "awc" (adapt while communicating) or "atc" (adapt then combine), got {form!r}')
    return form
