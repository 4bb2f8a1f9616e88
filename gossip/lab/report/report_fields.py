"""Validated access to the fields of a document of plain data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn
from xml.etree import ElementTree


class Field:
    """A value and its place in the document: every error names both.

    Parameters
    ----------
    value
        The value, as plain JSON data.
    place
        The place for error messages, such as ``rows[3].label``.
    """

    def __init__(self, value: Any, place: str) -> None:
        self.value = value
        self.place = place

    def __getitem__(self, name: str) -> Field:
        """Return the field of that name, which must exist."""
        mapping = self._mapping()
        if name not in mapping:
            raise ValueError(f"{self.place} has no {name!r}, only {sorted(map(str, mapping))}; add it")
        return self.get(name)

    def get(self, name: str) -> Field:
        """Return the field of that name, null if it is missing."""
        place = name if self.place == "document" else f"{self.place}.{name}"
        return Field(self._mapping().get(name), place)

    @property
    def is_null(self) -> bool:
        return self.value is None

    def items(self) -> list[Field]:
        """Return the entries of a list; none for null."""
        if self.is_null:
            return []
        if not isinstance(self.value, Sequence) or isinstance(self.value, str):
            self._refuse("a list")
        return [Field(value, f"{self.place}[{index}]") for index, value in enumerate(self.value)]

    def named(self) -> list[tuple[str, Field]]:
        """Return the entries of a mapping by name; none for null."""
        if self.is_null:
            return []
        return [(str(name), Field(value, f"{self.place}[{name!r}]")) for name, value in self._mapping().items()]

    def text(self) -> str:
        if not isinstance(self.value, str):
            self._refuse("text")
        return self.value

    def optional_text(self) -> str | None:
        return None if self.is_null else self.text()

    def texts(self) -> dict[str, str]:
        """Return texts by name; numbers and other plain data are formatted as text, null is omitted."""
        return {name: _plain(field.value) for name, field in self.named() if not field.is_null}

    def one_of(self, allowed: Sequence[str]) -> str:
        if self.value not in allowed:
            self._refuse(f"one of {', '.join(allowed)}")
        return str(self.value)

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            self._refuse("true or false")
        return self.value

    def optional_boolean(self) -> bool | None:
        return None if self.is_null else self.boolean()

    def integer(self, *, minimum: int | None = None) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self._refuse("an integer")
        if minimum is not None and self.value < minimum:
            self._refuse(f"at least {minimum}")
        return self.value

    def number(self, *, minimum: float | None = None) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not math.isfinite(self.value):
            self._refuse("a finite number (null where there is none)")
        if minimum is not None and self.value < minimum:
            self._refuse(f"at least {minimum:g}")
        return float(self.value)

    def optional_number(self, *, minimum: float | None = None) -> float | None:
        return None if self.is_null else self.number(minimum=minimum)

    def svg(self) -> str:
        """Return the markup of one svg element, with the namespace that it needs as a separate image."""
        markup = re.sub(r"^\s*<svg(?![^>]*\sxmlns=)", '<svg xmlns="http://www.w3.org/2000/svg"', self.text())
        try:
            tag = ElementTree.fromstring(markup.strip()).tag
        except ElementTree.ParseError as error:
            raise ValueError(f"{self.place} must be well-formed SVG, but: {error}") from error
        if tag != "{http://www.w3.org/2000/svg}svg":
            self._refuse("an <svg> element")
        return markup

    def _mapping(self) -> Mapping[str, Any]:
        if not isinstance(self.value, Mapping):
            self._refuse("a mapping")
        return self.value

    def _refuse(self, allowed: str) -> NoReturn:
        got = repr(self.value)
        raise ValueError(f"{self.place} must be {allowed}, got {got if len(got) <= 80 else got[:77] + '...'}")


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_plain(entry)}" for name, entry in value.items())
    if isinstance(value, Sequence):
        return ", ".join(map(_plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
