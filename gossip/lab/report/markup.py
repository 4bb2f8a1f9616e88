"""Construction of HTML and SVG elements. The writer of the standard library escapes their content."""

from __future__ import annotations

import base64
import gzip
from xml.etree import ElementTree
from xml.etree.ElementTree import Element as Element


def element(tag: str, *children: Element | str, **attributes: str | float | bool | None) -> Element:
    """Make an element with its children in order; True gives an attribute without a value, None and False omit it.

    Attributes are named ``class_`` for class and ``aria_label`` for aria-label; numbers have at most one decimal.
    """
    made = Element(tag)
    for name, value in attributes.items():
        if value is not None and value is not False:
            text = "" if value is True else value if isinstance(value, str) else f"{round(value, 1):g}"
            # SVG attribute names can have capitals (viewBox) and HTML attribute names hyphens, but neither underscores.
            made.set(name.rstrip("_").replace("_", "-"), text)
    return extend(made, *children)


def extend(parent: Element, *children: Element | str) -> Element:
    """Add elements and text to an element, and return it."""
    for child in children:
        if isinstance(child, Element):
            parent.append(child)
        elif len(parent):
            parent[-1].tail = (parent[-1].tail or "") + child
        else:
            parent.text = (parent.text or "") + child
    return parent


def html(root: Element) -> str:
    """Write an element as HTML; the content of script and style elements is not escaped."""
    return ElementTree.tostring(root, encoding="unicode", method="html")


def pack(text: str) -> str:
    """Compress a text to a third, as characters that are safe in an attribute or a script; unpack.js reverses it."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode("ascii")
