"""The notebooks run, and show what is written in them."""

import json
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
from repository import REPOSITORY
from running import run_here

SCRIPT = REPOSITORY / "scripts" / "notebooks.py"
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
FRESH = "reading_a_sweep"  # is read and checked by a fresh interpreter
TIMEOUT_S = 240


@pytest.fixture
def _strange_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jupyter's own folders offer a kernel of the same name that does not work."""
    kernel = tmp_path / ".local" / "share" / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    broken = {"argv": ["/bin/false", "{connection_file}"], "display_name": "broken", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(broken))
    startup = tmp_path / ".ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "print.py").write_text("print('a file of the user')")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PATH", str(kernel.parents[1]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / ".ipython"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("_strange_home")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_prints_what_is_written(path: Path) -> None:
    arguments = ["--check", path.with_suffix(".py")]
    if path.stem == FRESH:
        command = [sys.executable, str(SCRIPT), *arguments]
        fresh = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert fresh.returncode == 0, fresh.stderr
    else:
        run_here(SCRIPT.name, *arguments).succeeded()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_and_script_agree(path: Path) -> None:
    notebook, script = nbformat.read(path, as_version=4), jupytext.read(path.with_suffix(".py"), fmt="py:percent")
    cells = [[(cell.cell_type, cell.source) for cell in each.cells] for each in (notebook, script)]
    assert cells[0] == cells[1], f"{path.name} and its script differ; run python {SCRIPT.relative_to(REPOSITORY)}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_holds_nothing_of_the_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.language_info == {"name": "python"}
    assert not any(cell.metadata for cell in notebook.cells)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(output.get("name") == "stderr" for cell in code for output in cell.outputs)
    assert path.stat().st_size < 500_000


@pytest.mark.slow
@pytest.mark.usefixtures("_strange_home")
def test_writing_makes_the_same_file_again(tmp_path: Path) -> None:
    script, written = tmp_path / "small.py", tmp_path / "small.ipynb"
    script.write_text("# %% [markdown]\n# Two\n\n# %%\nprint(1)\nprint(2, flush=True)\n1 + 2\n")
    files = []
    for _ in range(2):
        run_here("notebooks.py", script).succeeded()
        files.append(written.read_bytes())
    assert files[0] == files[1]
    printed, value = nbformat.read(written, as_version=4).cells[1].outputs
    assert printed.text == "1\n2\n"
    assert value.data == {"text/plain": "3"}


@pytest.mark.slow
@pytest.mark.usefixtures("_strange_home")
@pytest.mark.parametrize(
    ("source", "message"), [("print(1)\nprint(2)", "+print(2)"), ("import os; os._exit(1)", "does not run")]
)
def test_check_tells_what_is_wrong(source: str, message: str, tmp_path: Path) -> None:
    script = tmp_path / "small.py"
    script.write_text(f"# %%\n{source}\n")
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print(1)")]), tmp_path / "small.ipynb")
    checked = run_here("notebooks.py", "--check", script)
    assert checked.status == 1
    assert "small" in checked.stderr
    assert message in checked.stderr
