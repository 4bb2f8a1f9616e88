"""Run the notebooks and write them with what they show, or check that what is written there still holds.

    python scripts/notebooks.py            # write notebooks/*.ipynb from notebooks/*.py
    python scripts/notebooks.py --check    # write nothing; the status is 1 where a notebook is out of date

The script (jupytext, py:percent) is the source. Who edits the notebook in Jupyter takes the changes over first:
``jupytext --sync notebooks/*.ipynb``. What cells print must be the same every time; of figures it is not asked, since
fonts differ between machines.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
CELL_TIMEOUT_S = 120
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def executed(script: Path) -> NotebookNode:
    """Return the notebook of a script with the outputs of this interpreter, whatever kernels the machine has."""
    notebook = jupytext.read(script, fmt="py:percent")
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_S,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        manager = client.create_kernel_manager()
        # Without folders to look in, the kernel is ipykernel's own, run by sys.executable.
        manager.kernel_spec_manager = KernelSpecManager(kernel_dirs=[])
        manager.connection_file = str(Path(folder, "connection.json"))
        manager.transport = "ipc"
        # A user's start-up files and settings are no part of a notebook.
        client.execute(env={**os.environ, "IPYTHONDIR": folder})
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
        cell.metadata = NotebookNode()
    return notebook


def text_of(notebook: NotebookNode) -> list[str]:
    """Return the lines of all cells, and of what they print; of a figure only that it is there."""
    return [line for cell in notebook.cells for line in _lines(cell)]


def _lines(cell: NotebookNode) -> Iterator[str]:
    yield f"[{cell.cell_type}]"
    yield from cell.source.splitlines()
    for output in cell.get("outputs", ()):
        if output.output_type == "stream":
            if output.name == "stdout":
                yield "[prints]"
                yield from output.text.splitlines()
        else:
            yield f"[shows {', '.join(sorted(output.get('data', ())))}]"


def difference(written: Path, notebook: NotebookNode) -> str:
    """Return how the written notebook differs, as a diff; empty if it does not."""
    before = text_of(nbformat.read(written, as_version=4)) if written.exists() else []
    return "\n".join(difflib.unified_diff(before, text_of(notebook), written.name, "run again", lineterm=""))


def main() -> int:
    """Write or check notebooks; return the exit status."""
    parser = argparse.ArgumentParser(description="Run notebooks and write what they show beside their scripts.")
    parser.add_argument("scripts", nargs="*", type=Path, help="default: all of notebooks/")
    parser.add_argument("--check", action="store_true", help="write nothing, tell what is out of date")
    options = parser.parse_args()
    status = 0
    for script in options.scripts or sorted(FOLDER.glob("*.py")):
        written = script.with_suffix(".ipynb")
        try:
            notebook = executed(script)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            print(f"{script.name} does not run:\n{COLOURS.sub('', str(error))}", file=sys.stderr)
            status = 1
            continue
        if not options.check:
            nbformat.write(notebook, written)
        elif found := difference(written, notebook):
            print(f"{written.name} is out of date; run python scripts/notebooks.py\n{found}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
