"""The options that there are: the text of ``--help``, and what was probably meant by one that there is not.

``--help`` shows the config files themselves, which have a comment for every option. An error of hydra or OmegaConf is
said in one line.
"""

import difflib
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gossip.lab.experiments.config_store import OWN, REGISTRIES, options_of, registered
from gossip.lab.experiments.records import leaves
from gossip.lab.experiments.validated_models import ConfigurationError, nearest

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


def explain(error: BaseException, config_folder: Path, config_name: str = "train") -> str | None:
    """Return a one-line message for a failed hydra composition or a folder that cannot be created.

    None for any other error. Only keys of the primary config ``config_name``, and of files that it can select in
    ``config_folder``, are suggested.
    """
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    if isinstance(error, MissingConfigException) and "/" in (error.missing_cfg_file or ""):
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        # For a list of files, hydra does not report the available options.
        names = sorted(error.options or (path.stem for path in (config_folder / group).glob("*.yaml")))
        own = f"; {group}={OWN[group]}" if group in OWN else ""
        return f"there is no {group}={name}{nearest(name, names)} Available: {', '.join(names)}{own}"
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has no value; set it: {error.full_key}=..."
    if isinstance(error, OverrideParseException):
        if "=" not in error.override:
            return f"{error.override} has no value; write {error.override}=..., and --help for the options there are"
        reason = " ".join(str(error).split())
        return f"{error.override} cannot be read as option=value; quote lists and texts, as in 'key=[1,2]' ({reason})"
    ambiguous = re.match(r"Ambiguous value for argument '(.*)'", str(error))
    if isinstance(error, HydraException) and ambiguous:
        key, _, values = ambiguous[1].partition("=")
        return f"{key}={values} are several values: add -m for a run of each, or write a list as {key}=[{values}]"
    unknown = re.match(r"Could not (?:override|delete from config\.) '([^']*)'", str(error))
    if isinstance(error, HydraException) and unknown:
        return f"the configuration has no key {unknown[1]}{_instead_of(unknown[1], config_folder, config_name)}"
    if isinstance(error, ValueError) and str(error).startswith("Config group override must be"):
        return (
            "every argument is option=value, and a config group takes the name of one of its files, as in "
            "topology=ring; --help shows those that there are"
        )
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; output_root=... says where run folders are made"
    hydras = (HydraException, OmegaConfBaseException)
    if isinstance(error, hydras):
        causes = [cause for cause in (error, error.__cause__) if isinstance(cause, hydras)]
        lines = [(str(cause).strip().splitlines() or [type(cause).__name__])[0] for cause in causes]
        place = re.search(r"full_key: (\S+)", str(error))
        return ": ".join([*([] if place is None else [f"{place[1]} cannot be resolved"]), *lines])
    return None


def check_flags(arguments: Sequence[str]) -> None:
    """Refuse arguments that begin with a dash and are not flags of hydra, which would answer with its full usage."""
    from hydra._internal.utils import get_args_parser

    flags = {name: action for action in get_args_parser()._actions for name in action.option_strings}
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if not name.startswith("-") or name == "--":
            continue
        meant = [flag for flag in flags if flag == name or (name.startswith("--") and flag.startswith(name))]
        if not meant:
            raise ConfigurationError(
                f"there is no flag {name}{nearest(name, list(flags))} Options are written without dashes, option=value"
            )
        if equals and flags[meant[0]].nargs == 0:
            raise ConfigurationError(f"{argument}: {name} takes no value; write {name}")


def _instead_of(key: str, config_folder: Path, config_name: str) -> str:
    """Suggest the files of config groups that have the key, or a key that is like it."""
    known: dict[str, list[str]] = {}
    for option, choice in _options(config_folder, config_name):
        known.setdefault(option, []).extend([choice] if choice else [])
    if known.get(key):
        return f"; it is an option of {', '.join(known[key])}"
    last = key.rpartition(".")[2]
    same_end = [option for option in known if option.rpartition(".")[2] == last]
    close = same_end or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else "; --help shows those that there are"


def _options(config_folder: Path, config_name: str) -> Iterator[tuple[str, str]]:
    """Yield every key, and the choice of a config group that has it, ``group=name``; empty for the primary config."""
    for path in primary_files(config_folder, config_name):
        yield from ((key, "") for key in _keys(path, "") if key.partition(".")[0] not in ("defaults", "hydra"))
    for group, paths in group_files(config_folder, config_name).items():
        yield group, ""
        for path in paths if group != "experiment" else ():  # an experiment file repeats keys of others
            yield from ((key, f"{group}={path.stem}") for key in _keys(path, group.replace("/", ".")))
        for name in registered(group, config_folder):
            yield from ((f"{group}.options.{option}", f"{group}={name}") for option in options_of(group, name))


def _keys(path: Path, above: str) -> Iterator[str]:
    from omegaconf import OmegaConf

    content: Any = OmegaConf.to_container(OmegaConf.load(path))
    yield from (key for key, _ in leaves(content, above))
