"""Where pictures are written, and the settings that make them the same every time."""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any


def output_path(path: str | os.PathLike[str]) -> Path:
    """Return the path, which ends in the suffix of a picture and lies in a folder that exists."""
    path = Path(path)
    if path.suffix.lower() not in (".svg", ".png"):
        raise ValueError(f"path must end in .svg or .png, got {str(path)!r}; change the suffix")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder of {str(path)!r} does not exist; create {str(path.parent)!r} first")
    return path


def save(figure: Any, path: Path) -> None:
    """Write a figure; the same figure makes the same file, byte for byte."""
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def settings(font_type: str) -> AbstractContextManager[Any]:
    """Return the settings under which the same topology makes the same file, whatever the user has set."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "drawing needs matplotlib; install it in a clone of the repository: pip install '.[plot]'"
        ) from error
    chosen = {
        **matplotlib.rcParamsDefault,
        "svg.hashsalt": "topologies",
        "svg.fonttype": font_type,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"] if font_type == "path" else ["DejaVu Sans", "Verdana", "sans-serif"],
    }
    chosen.pop("backend", None)
    return matplotlib.rc_context(chosen)
