"""The text of ``--help``: the config files themselves, which have a comment for every option."""

from __future__ import annotations

import inspect
from pathlib import Path

from gossip.lab.experiments.config_store import OWN, REGISTRIES, options_of, registered

FLAGS = ("--help", "-h")

_OTHER_FLAGS = """\
  -m, --multirun   run every combination of several values: -m topology=ring,torus seed=0,1
  --cfg job        print the configuration that the other arguments amount to, and run nothing
  --hydra-help     what else hydra's command line has"""


def help_text(script: str, config_folder: Path, config_name: str) -> str:
    """Return the text that ``--help`` prints for ``script``, as the user invoked it, and a primary config."""
    is_bench = config_name == "bench"
    lines = [
        f"{'python ' if script.endswith('.py') else ''}{script} [group=file ...] [option=value ...]",
        "",
        "Flags",
        *_OTHER_FLAGS.splitlines()[is_bench:],  # bench has no multirun: one run measures everything
        "",
        f"Options, as in {'bench.steps=5' if is_bench else 'training.epochs=5'}, with their values unless you set them",
        f"(world_size=N is short for {'bench' if is_bench else 'launch'}.world_size=N)",
    ]
    for path in primary_files(config_folder, config_name):
        lines += ["", path.name, *_indented(path.read_text(encoding="utf-8").partition("\nhydra:")[0])]
    for group, paths in group_files(config_folder, config_name).items():
        lines += ["", f"{group}=FILE, with its options as {group.replace('/', '.')}.OPTION=..., for which there are"]
        for path in paths:
            lines += ["", f"{group}={path.stem}", *_indented(path.read_text(encoding="utf-8"))]
        if group in OWN:
            lines += ["", f"{group}={OWN[group]} (docs/experiments.md)"]
        for name in registered(group, config_folder):
            summary = (inspect.getdoc(REGISTRIES[group].get(name)) or "").partition("\n")[0]
            lines += ["", f"{group}={name}", f"  {summary}".rstrip()]
            lines += [f"  {group}.options.{option}={value}" for option, value in options_of(group, name).items()]
    return "\n".join(lines)


def _indented(text: str) -> list[str]:
    return [f"  {line}".rstrip() for line in text.strip().splitlines() if not line.startswith("# @")]


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
