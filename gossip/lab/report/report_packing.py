"""Compression of text in the page to a third of its size: gzip in base64; unpack.js decompresses it."""

from __future__ import annotations

import base64
import gzip


def pack(text: str) -> str:
    """Compress a text deterministically to characters that are safe in an attribute or a script element."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode("ascii")
