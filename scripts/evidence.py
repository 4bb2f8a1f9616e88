"""Make the tables and figures of README.md and docs/ again, each by the command that docs/evidence.yaml has for it.

    bash scripts/evidence.sh                    # all: hours, some of them as root; again: what is missing or has failed
    bash scripts/evidence.sh overhead overlap   # these runs alone
    bash scripts/evidence.sh --no-run           # nothing is run: what is there goes into the pages

A run leaves outputs/evidence/NAME: what its command printed and wrote, and record.json with the command, the exit
status, the date, the machine and the versions. Its results go into the pages, between <!-- evidence: NAME --> and
<!-- /evidence -->, with the command and the record. A block whose run is not there, failed, or was of another command
stays as it is, and is named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from gossip.compression.compiled_passes import quantized_by
from gossip.lab.benchmarks.network.shaped_hosts import Lab
from gossip.lab.experiments.validated_models import ConfigurationError, Model, read

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(?<=<!-- evidence: )(\S+)( -->\n)(.*?)(?=<!-- /evidence -->)", re.DOTALL)
Source = tuple[str, str, str]
PACKAGES = ("torch", "numpy", "gossip-training", "decent-dp")


class Table(Model):
    """A table of a run: some rows of some columns of the tables that one of its files has in Markdown.

    Columns are by their headings on the page; each is the one whose heading begins with the text, or with the third of
    (file, section, heading). Rows are those of the first column, by the texts in the first column of each table.
    """

    file: str = "output.txt"
    columns: dict[str, str | Source | None] = Field(default_factory=dict)
    rows: str = ""


class Block(Model):
    """What stands between two markers: tables, or the figure to which the page has a link there."""

    tables: tuple[Table, ...] = ()
    figure: str | None = None


class Run(Model):
    """A command for bash, which leaves its files in $OUT; ``files`` are kept, by their new places."""

    command: str
    lab: bool = False
    resumes: bool = False
    blocks: dict[str, Block] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The command as pages show it: indented, for any folder."""
        command = re.sub(r" hydra\.(?:run|sweep)\.dir=\S*", "", self.command.strip())
        return re.sub("^", "    ", re.sub(r"\$OUT(/run\b)?", "FOLDER", command), flags=re.MULTILINE)


def runs_of(path: Path = ROOT / "docs" / "evidence.yaml") -> dict[str, Run]:
    """Return the declared runs by their names."""
    return {name: read(Run, content, name) for name, content in yaml.safe_load(path.read_text("utf-8")).items()}


def pages_of(root: Path) -> list[Path]:
    """Return the pages that may have blocks."""
    return [root / "README.md", *sorted(page for page in (root / "docs").rglob("*.md") if "_build" not in page.parts)]


def measure(run: Run, out: Path) -> bool:
    """Run the command, unless a record says that it has succeeded; return whether it has."""
    if finished(run, out):
        return True
    if not run.resumes or _record(out).get("command") != run.command:
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    processors = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    record = {
        "command": run.command,
        "status": None,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": f"{processors[0] if processors else platform.machine()}, {os.cpu_count()} cores",
        "versions": {"Linux": platform.release(), "Python": platform.python_version()}
        | {package.name: package.version for package in distributions() if package.name in PACKAGES},
    }
    path, start = out / "record.json", time.monotonic()
    path.write_text(json.dumps(record, indent=2), encoding="utf-8")
    environment = {**os.environ, "OUT": str(out.resolve())}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    with (out / "output.txt").open("w", encoding="utf-8") as stdout:
        record["status"] = subprocess.run(
            ["bash", "-euc", run.command], cwd=ROOT, env=environment, stdout=stdout, check=False
        ).returncode
    record["seconds"] = round(time.monotonic() - start, 1)
    path.write_text(json.dumps(record, indent=2), encoding="utf-8")
    return record["status"] == 0


def _record(out: Path) -> dict[str, Any]:
    path = out / "record.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def finished(run: Run, out: Path) -> dict[str, Any]:
    """Return the record of this command if it has succeeded, else an empty one."""
    record = _record(out)
    return record if (record.get("command"), record.get("status")) == (run.command, 0) else {}


def update(root: Path, runs: Mapping[str, Run], folder: Path) -> list[str]:
    """Write into the pages, and into other files, what is in the folder; return what stays as it is, and why."""
    places = {name: (folder / key, run, block) for key, run in runs.items() for name, block in run.blocks.items()}
    left: list[str] = []
    for page in pages_of(root):

        def block(match: re.Match[str], page: Path = page) -> str:
            name, between, present = match.groups()
            if name not in places:
                return match[0]
            try:
                return f"{name}{between}{_content(*places[name], present, page.parent)}"
            except (FileNotFoundError, ValueError) as error:
                left.append(f"{page.relative_to(root)}: {name}: {error}")
                return match[0]

        text = page.read_text(encoding="utf-8")
        if (new := BLOCK.sub(block, text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"{page.relative_to(root)} has changed: read what it says about its numbers again")
    for name, run in runs.items():
        for target, source in run.files.items() if finished(run, folder / name) else ():
            shutil.copyfile(folder / name / source, root / target)
    return left


def _content(out: Path, run: Run, block: Block, present: str, page_folder: Path) -> str:
    record = finished(run, out)
    if not record:
        raise ValueError(f"{out} has no finished run of its command")
    if block.figure is None:
        shown = "\n\n".join(_table(table, out) for table in block.tables)
    else:
        link = re.search(r"^!\[.*?\]\((.*?)\)$", present, re.MULTILINE)
        if link is None:
            raise ValueError("there is no ![words](file) for the figure between the markers")
        shown = link[0]
        shutil.copyfile(out / block.figure, page_folder / link[1])
    versions = ", ".join(f"{package} {number}" for package, number in record["versions"].items())
    return f"{run.shown}\n\n{shown}\n\n*{record['date'][:10]}; {record['machine']}; {versions}.*\n"


def _tables_in(path: Path) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the tables of a file in Markdown, each with the heading before it, as lists of cells."""
    section, rows = "", []
    for line in [*path.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif rows:
            yield section, rows
            rows = []
        if line.startswith("#"):
            section = line.lstrip("# ")


def _table(table: Table, out: Path) -> str:
    if table.columns:
        sources = (source or title for title, source in table.columns.items())
        places = ((table.file, "", each) if isinstance(each, str) else each for each in sources)
        columns = [_column(out, *place, table.rows) for place in places]
        rows = [list(table.columns), *([column.get(key, "") for column in columns] for key in columns[0])]
    else:
        _, rows = next(_tables_in(out / table.file), ("", []))
        rows = [*rows[:2], *(row for row in rows[2:] if re.search(table.rows, _line(row)))]
    return "\n".join(map(_line, rows))


def _line(row: Sequence[str]) -> str:
    return f"| {' | '.join(row)} |"


def _column(out: Path, file: str, section: str, title: str, chosen: str) -> dict[tuple[str, int], str]:
    """Return the cells of a column in the chosen rows, and in the line below its heading.

    They are by those of the table's first column, and how often each has come there.
    """
    for heading, (titles, below, *rows) in _tables_in(out / file):
        for place, text in enumerate(titles if heading.startswith(section) else ()):
            if text.startswith(title):
                shown = [below, *(row for row in rows if re.search(chosen, _line(row)))]
                names = [row[0] for row in shown]
                return {(name, names[:at].count(name)): shown[at][place] for at, name in enumerate(names)}
    raise ValueError(f"{out / file} has no column {title!r} below a heading {section!r}")


def main() -> int:
    """Run, write and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = runs_of()
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of runs: {', '.join(runs)}")
    parser.add_argument("--no-run", action="store_true", help="write what is there")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "outputs" / "evidence", help="of all outputs (%(default)s)"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(runs):
        parser.error(f"there is no run {', '.join(sorted(unknown))}; there are {', '.join(runs)}")
    if not arguments.no_run and quantized_by() != "C":
        parser.error(
            "int8 and int4 are not compiled here, and would be measured so; install the package (pip install -e .)"
        )
    chosen = {name: runs[name] for name in arguments.names or runs}
    failed = []
    for name, run in () if arguments.no_run else chosen.items():
        print(f"== {name}\n{run.shown}", flush=True)
        try:
            if run.lab:
                Lab(2).close()
            failed += [] if measure(run, arguments.folder / name) else [name]
        except ConfigurationError as error:
            failed.append(f"{name} ({error})")
    for line in update(ROOT, chosen, arguments.folder):
        print(f"left as it is: {line}")
    print(f"evidence: failed: {', '.join(failed)}" if failed else "evidence: done")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
