"""Elements of HTML and SVG. The standard library's writer escapes what stands in them."""

from __future__ import annotations

from xml.etree import ElementTree
from xml.etree.ElementTree import Element as Element


def element(tag: str, *children: Element | str, **attributes: str | float | bool | None) -> Element:
    """Make an element.

    Parameters
    ----------
    tag
        Its name.
    children
        Elements and text, in order.
    attributes
        ``class_`` is class, ``aria_label`` aria-label; numbers are written with at most one decimal, True is an
        attribute without a value, None and False leave it out.
    """
    made = Element(tag)
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        made.set(_attribute_name(name), _attribute_value(value))
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
    """Write an element as HTML; a script and a style stand as they are."""
    return ElementTree.tostring(root, encoding="unicode", method="html")


def _attribute_name(name: str) -> str:
    # SVG has names with capitals (viewBox), HTML such with hyphens: neither has underscores.
    return name.rstrip("_").replace("_", "-")


def _attribute_value(value: str | float | bool) -> str:
    if value is True:
        return ""
    return value if isinstance(value, str) else f"{round(value, 1):g}"
