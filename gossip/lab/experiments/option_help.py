"""The text of ``--help``: every option in the config files, with the comment on its line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from gossip.lab.experiments.config_store import options_of, registered, summary_of
from gossip.lab.experiments.user_targets import OWN

FLAGS = ("--help", "-h")

_LINE = re.compile(r"( *)([\w/]+):(?: +([^#\s].*?))?(?:\s+# (.*))?$")
_NO_OPTIONS = ("defaults", "hydra")  # sections that belong to hydra
_OF_A_FILE = ("_target_", "name", "options={}")  # implied by the choice of the file
_OTHER_FLAGS = """\
  -m, --multirun   run every combination of several values: -m topology=ring,torus seed=0,1
  --cfg job        print the configuration that the other arguments amount to, and run nothing
  --hydra-help     what else hydra's command line has"""


def help_text(script: str, config_folder: Path, config_name: str) -> str:
    """Return the text that ``--help`` prints.

    Parameters
    ----------
    script : str
        The script as the user invoked it, ``sys.argv[0]``.
    config_folder : Path
        The folder of the config files.
    config_name : str
        The name of the primary config.
    """
    primary = config_folder / f"{config_name}.yaml"
    above = config_folder / "train.yaml" if "- train\n" in primary.read_text(encoding="utf-8") else None
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
    if above is not None:
        lines += ["", f"Options as of {above.name}", *_options(above)]
    for group in sorted(_groups(config_folder, config_name)):
        lines += ["", f"{group}=FILE, for which there are"]
        for path in sorted((config_folder / group).glob("*.yaml")):
            lines += ["", f"{group}={path.stem}", *(f"  {line}" for line in _comment(path))]
            if group != "experiment":  # an experiment file only overrides options of other groups
                lines += _options(path, group)
        if group in OWN:
            own = OWN[group]
            lines += ["", f"{group}={own.written}", f"  {own.meaning.capitalize()} (docs/experiments.md)."]
        for name in registered(group, config_folder):
            lines += ["", f"{group}={name}", f"  {summary_of(group, name)}".rstrip()]
            lines += [f"  {group}.options.{option}={value}" for option, value in options_of(group, name).items()]
    return "\n".join(lines)


def _groups(config_folder: Path, config_name: str) -> set[str]:
    """Return the config groups from which the primary config selects a file."""
    is_bench = config_name == "bench"
    folders = {path.parent.relative_to(config_folder).as_posix() for path in config_folder.rglob("*.yaml")} - {"."}
    return {group for group in folders if group.startswith("bench") == is_bench}


def _comment(path: Path) -> list[str]:
    """Return the lines of the comment at the top of a config file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line[2:] for line in _while_comment(lines) if not line.startswith("# @")]


def _while_comment(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("#"):
            return
        yield line


def _options(path: Path, group: str = "") -> list[str]:
    """Return one line per option: the key as it is written on the command line, its value and its comment."""
    rows = [row for row in _rows(path, group.replace("/", ".")) if row[0].partition(".")[0] not in _NO_OPTIONS]
    if group:
        rows = [row for row in rows if not row[0].removeprefix(f"{group}.").startswith(_OF_A_FILE)]
    width = min(44, max((len(option) for option, _ in rows), default=0))
    return [f"  {option:{width}}  {comment}".rstrip() for option, comment in rows]


def _rows(path: Path, prefix: str) -> Iterator[tuple[str, str]]:
    above: list[tuple[int, str]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        indent, key, value, comment = len(match[1]), match[2], match[3], match[4] or ""
        while above and above[-1][0] >= indent:
            above.pop()
        name = ".".join([*([prefix] if prefix else []), *(part for _, part in above), key])
        if value is None:
            above.append((indent, key))
        if value is not None or comment:
            yield name if value is None else f"{name}={value}", comment
