"""Drawings as pictures of their own within the page: their styles, names and scripts reach nothing outside of them."""

from __future__ import annotations

import re
from urllib.parse import quote

_NOT_DRAWN = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|<metadata>.*?</metadata>", re.DOTALL)
_PATH = re.compile(r'(\s(?:d|points)=")([^"]*)(")')
_LONG_NUMBER = re.compile(r"-?\d+\.\d{2,}(?:e[+-]?\d+)?")
#: What may stand in a data URL within an attribute in double quotes.
_SAFE = " <>/=.,;:!'()*+-_~@$[]{}|^`"


def picture_url(svg: str) -> str:
    """Return an SVG as a data URL, without what does not show: metadata and more than four digits of a place."""
    svg = _NOT_DRAWN.sub("", svg)
    svg = _PATH.sub(lambda match: match[1] + _short_path(match[2]) + match[3], svg)
    svg = re.sub(r"\s*\n\s*", " ", svg).strip()
    return "data:image/svg+xml," + quote(svg, safe=_SAFE)


def _short_path(path: str) -> str:
    return " ".join(_LONG_NUMBER.sub(lambda match: f"{float(match[0]):.4g}", path).split())
