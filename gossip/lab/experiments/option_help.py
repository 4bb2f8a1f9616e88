"""The text of ``--help``: every option in the config files, with the comment on its line."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from gossip.lab.experiments.config_store import OWN, REGISTRIES, options_of, registered
from topologies.command_lines import as_written

FLAGS = ("--help", "-h")

_LINE = re.compile(r"( *)([\w/]+):(?: +([^#\s].*?))?(?:\s+# (.*))?$")
_OF_HYDRA = ("defaults", "hydra")
_OF_A_FILE = ("_target_", "name", "options={}")  # implied by the choice of the file
_OTHER_FLAGS = """\
  -m, --multirun   run every combination of several values: -m topology=ring,torus seed=0,1
  --cfg job        print the configuration that the other arguments amount to, and run nothing
  --hydra-help     what else hydra's command line has"""


def help_text(script: str, config_folder: Path, config_name: str) -> str:
    """Return the text that ``--help`` prints for ``script``, as the user invoked it, and a primary config."""
    primary, *above = primary_files(config_folder, config_name)
    lines = [
        f"{'python ' if script.endswith('.py') else ''}{script} [group=file ...] [option=value ...]",
        "",
        *_comment(primary),
        "",
        "Flags",
        *_OTHER_FLAGS.splitlines()[config_name == "bench" :],  # bench has no multirun: one run measures everything
        "",
        "Options, with their values unless you set them",
        *_options(primary),
    ]
    for path in above:
        lines += ["", f"Options as of {path.name}", *_options(path)]
    for group, paths in group_files(config_folder, config_name).items():
        lines += ["", f"{group}=FILE, for which there are"]
        for path in paths:
            lines += ["", f"{group}={path.stem}", *(f"  {line}" for line in _comment(path))]
            if group != "experiment":  # an experiment file only overrides options of other groups
                lines += _options(path, group)
        if group in OWN:
            lines += ["", f"{group}={OWN[group]} (docs/experiments.md)"]
        for name in registered(group, config_folder):
            summary = (inspect.getdoc(REGISTRIES[group].get(name)) or "").partition("\n")[0]
            lines += ["", f"{group}={name}", f"  {summary}".rstrip()]
            lines += [f"  {group}.options.{option}={value}" for option, value in options_of(group, name).items()]
    return as_written(as_written("\n".join(lines), "launch.world_size"), "bench.world_size")


def primary_files(config_folder: Path, config_name: str) -> list[Path]:
    """Return the file of a primary config, and ``train.yaml`` where that extends it."""
    primary = config_folder / f"{config_name}.yaml"
    extends = "- train\n" in primary.read_text(encoding="utf-8")
    return [primary, config_folder / "train.yaml"] if extends else [primary]


def group_files(config_folder: Path, config_name: str) -> dict[str, list[Path]]:
    """Return the files of each config group from which a primary config selects."""
    groups: dict[str, list[Path]] = {}
    for path in sorted(config_folder.glob("*/**/*.yaml")):
        group = path.parent.relative_to(config_folder).as_posix()
        if group.startswith("bench") == (config_name == "bench"):
            groups.setdefault(group, []).append(path)
    return groups


def _comment(path: Path) -> list[str]:
    """Return the lines of the comment at the top of a config file."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return [line[2:] for line in lines if not line.startswith("# @")]


def _options(path: Path, group: str = "") -> list[str]:
    """Return one line per option: the key as it is written on the command line, its value and its comment."""
    rows = [row for row in rows_of(path, group.replace("/", ".")) if row[0].partition(".")[0] not in _OF_HYDRA]
    if group:
        rows = [row for row in rows if not row[0].removeprefix(f"{group}.").startswith(_OF_A_FILE)]
    width = min(44, max((len(option) for option, _ in rows), default=0))
    return [f"  {option:{width}}  {comment}".rstrip() for option, comment in rows]


def rows_of(path: Path, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the options of a config file below a key, as they are written on the command line, and their comments."""
    above: list[tuple[int, str]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        indent, key, value, comment = len(match[1]), match[2], match[3], match[4] or ""
        while above and above[-1][0] >= indent:
            above.pop()
        name = ".".join(filter(None, [prefix, *(part for _, part in above), key]))
        if value is not None:
            yield f"{name}={value}", comment
        else:
            above.append((indent, key))
            if comment:
                yield name, comment
