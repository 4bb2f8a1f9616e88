"""Drawings as isolated images within the page: their styles, ids and scripts do not affect anything outside of them.

A drawing is stored, packed, in an attribute of its image, and report.js passes it to the image as a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from gossip.lab.report.markup import Element, element, pack

_MOST_DRAWINGS = 6
_NOT_DRAWN = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|<metadata>.*?</metadata>", re.DOTALL)
_PATH = re.compile(r'(\s(?:d|points)=")([^"]*)(")')
_LONG_NUMBER = re.compile(r"-?\d+\.\d{2,}(?:e[+-]?\d+)?")


def make_gallery(drawings: Mapping[str, str]) -> Iterator[Element]:
    """Yield one gallery, or for many drawings one per number of ranks (the last part of the titles)."""
    groups: dict[str, list[Element]] = {}
    for title, svg in drawings.items():
        picture = element("img", data_packed=pack(plain_picture(svg)), alt=f"Drawing of {title}")
        group = title.rpartition(", ")[2] if len(drawings) > _MOST_DRAWINGS else ""
        groups.setdefault(group, []).append(element("figure", picture, element("figcaption", title)))
    galleries = {group: element("div", *figures, class_="gallery") for group, figures in groups.items()}
    if len(galleries) == 1:
        yield from galleries.values()
        return
    for number, (group, gallery) in enumerate(galleries.items()):
        yield element("details", element("summary", group), gallery, open=number == 0)


def plain_picture(svg: str) -> str:
    """Return an SVG without invisible content: metadata, and digits of coordinates beyond the fourth."""

    def short(match: re.Match[str]) -> str:
        path = _LONG_NUMBER.sub(lambda number: f"{float(number[0]):.4g}", match[2])
        return match[1] + " ".join(path.split()) + match[3]

    return re.sub(r"\s*\n\s*", " ", _PATH.sub(short, _NOT_DRAWN.sub("", svg))).strip()
