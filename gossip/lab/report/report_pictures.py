"""Drawings as isolated images within the page: their styles, ids and scripts do not affect anything outside of them.

A drawing is stored, packed, in an attribute of its image, and report.js passes it to the image as a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from gossip.lab.report.markup import Element, element
from gossip.lab.report.report_packing import pack

_MOST_DRAWINGS = 6
_NOT_DRAWN = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|<metadata>.*?</metadata>", re.DOTALL)
_PATH = re.compile(r'(\s(?:d|points)=")([^"]*)(")')
_LONG_NUMBER = re.compile(r"-?\d+\.\d{2,}(?:e[+-]?\d+)?")


def make_gallery(drawings: Mapping[str, str]) -> Iterator[Element]:
    """Yield one gallery, or for many drawings one per number of ranks (the last part of the titles)."""
    groups: dict[str, list[Element]] = {}
    for title, svg in drawings.items():
        picture = element("img", data_packed=pack(plain_picture(svg)), alt=f"Drawing of {title}")
        figure = element("figure", picture, element("figcaption", title))
        groups.setdefault(title.rpartition(", ")[2], []).append(figure)
    if len(drawings) <= _MOST_DRAWINGS or len(groups) == 1:
        yield element("div", *(figure for figures in groups.values() for figure in figures), class_="gallery")
        return
    for number, (group, figures) in enumerate(groups.items()):
        gallery = element("div", *figures, class_="gallery")
        yield element("details", element("summary", group), gallery, open=number == 0)


def plain_picture(svg: str) -> str:
    """Return an SVG without invisible content: metadata, and digits of coordinates beyond the fourth."""
    svg = _NOT_DRAWN.sub("", svg)
    svg = _PATH.sub(lambda match: match[1] + _short_path(match[2]) + match[3], svg)
    return re.sub(r"\s*\n\s*", " ", svg).strip()


def _short_path(path: str) -> str:
    return " ".join(_LONG_NUMBER.sub(lambda match: f"{float(match[0]):.4g}", path).split())
