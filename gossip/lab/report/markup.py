"""Construction of HTML and SVG elements. The writer of the standard library escapes their content."""

from __future__ import annotations

from xml.etree import ElementTree
from xml.etree.ElementTree import Element as Element


def element(tag: str, *children: Element | str, **attributes: str | float | bool | None) -> Element:
    """Make an element.

    Parameters
    ----------
    tag
        The name of the element.
    children
        The child elements and texts, in order.
    attributes
        The attributes: ``class_`` stands for class, ``aria_label`` for aria-label. Numbers are written with at most
        one decimal, True gives an attribute without a value, None and False omit it.
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
    """Write an element as HTML; the content of script and style elements is not escaped."""
    return ElementTree.tostring(root, encoding="unicode", method="html")


def _attribute_name(name: str) -> str:
    # SVG attribute names can have capitals (viewBox) and HTML attribute names hyphens, but neither have underscores.
    return name.rstrip("_").replace("_", "-")


def _attribute_value(value: str | float | bool) -> str:
    if value is True:
        return ""
    return value if isinstance(value, str) else f"{round(value, 1):g}"
