"""The allow-list for ``_target_``: classes and functions that are harmless for any arguments.

A target is imported and called, and a configuration may come from an untrusted source: with ``resume=FOLDER`` it is
read from that folder.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gossip.lab.experiments.validated_models import ConfigurationError

OPTION = "trusted_targets"
"""The option by which a user extends the allow-list. It is read from the command line, never from a resumed folder."""

TARGET = "_target_"


@dataclass(frozen=True)
class _Package:
    """A group of definitions that a target may name.

    Attributes
    ----------
    written : str
        The prefix of the target; nothing outside this package is imported.
    defined : str
        The module, or the package of modules, in which the object must be defined: a dotted name can lead to anything
        that a module has imported, as ``torch.optim.adam.torch.load`` does.
    functions : bool
        Whether public functions are allowed; if not, only classes.
    """

    written: str
    defined: str
    functions: bool = False


_OPTIMIZERS = _Package("torch.optim", "torch.optim")
_MODULES = _Package("torch.nn", "torch.nn.modules")


def _own(module: str, *, functions: bool = False) -> _Package:
    return _Package("gossip", module, functions)


ALLOWED: Mapping[str, tuple[_Package, ...]] = {
    "data": (_own("gossip.lab.experiments.datasets", functions=True),),
    "model": (_own("gossip.lab.experiments.models"), _MODULES),
    "wrapper": (_own("gossip.wrapper"),),
    "algorithm": (_own("gossip.algorithms"),),
    "compression": (_own("gossip.compression"),),
    "optimizer": (_OPTIMIZERS, _own("gossip.optimizers.accum_adam")),
    "scheduler": (_own("gossip.lab.experiments.lr_schedules", functions=True), _OPTIMIZERS),
}
"""The allowed definitions by config section, which apply to nested targets too; other sections allow no target."""


def check_targets(config: Mapping[str, Any]) -> None:
    """Refuse every ``_target_`` that is neither allowed in its section nor trusted. Local.

    Nothing is called. All names are checked before anything is imported, and only allowed or trusted names are
    imported; then the objects that they denote are checked. Interpolations, which hydra would resolve further, are
    refused.

    Parameters
    ----------
    config : mapping
        The resolved configuration as plain data. ``trusted_targets`` lists further packages, modules, classes and
        functions that may be named.

    Raises
    ------
    ConfigurationError
        A target is refused. The message names the target, its place, what is allowed there and how to trust it.
    """
    trusted = trusted_names(config)
    found = list(_targets(config))
    for place, name in found:
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            raise ConfigurationError(f"{place}={name!r} is no name of a class or function, as package.module.Name is")
    refused = _refused(found, trusted)
    if refused:
        raise _refusal([(place, name, name) for place, name in refused], trusted)
    for place, name in found:
        if name not in trusted:
            _check_definition(place, name, trusted)
    for section in ALLOWED:
        for place, value in _leaves(config.get(section), section):
            if "${" in str(value):
                raise ConfigurationError(f"{place}={value}: a run's configuration has no ${{...}}; put the value there")


def check_imports(config: Mapping[str, Any], asked: Mapping[str, Any], path: str) -> None:
    """Refuse modules that a resumed run would import and that the present command does not name as well. Local.

    Parameters
    ----------
    config : mapping
        The configuration saved in the folder of the run.
    asked : mapping
        The configuration that results from the present command.
    path : str
        The file that holds ``config``, for the error message.

    Raises
    ------
    ConfigurationError
        A module in ``imports`` of ``config`` is in neither ``imports`` nor ``trusted_targets`` of the command. The
        message names everything that must be trusted, including the targets of the saved configuration.
    """
    trusted = trusted_names(asked)
    names = [str(name) for name in config.get("imports") or ()]
    refused = [name for name in names if name not in (asked.get("imports") or ()) and not _is_trusted(name, trusted)]
    if not refused:
        return
    targets = [name for _, name in _refused([each for each in _targets(config) if isinstance(each[1], str)], trusted)]
    and_targets = f" and names {', '.join(targets)}" if targets else ""
    raise ConfigurationError(
        f"{path} has imports=[{','.join(refused)}], which would run "
        f"{'that module' if len(refused) == 1 else 'these modules'} here{and_targets}; if you trust "
        f"{'it' if len(refused) + len(targets) == 1 else 'them'}, add {_trusting(refused + targets, trusted)}"
    )


def locate(place: str, name: str) -> Any:
    """Import and return the object that a target names.

    Raises
    ------
    ConfigurationError
        The object cannot be imported.
    """
    first, *others = name.split(".")
    found: Any = None
    path = first
    try:
        found = importlib.import_module(first)
        for part in others:
            path = f"{path}.{part}"
            if inspect.ismodule(found) and not hasattr(found, part):
                found = importlib.import_module(path)
            else:
                found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        near = difflib.get_close_matches(path.rpartition(".")[2], dir(found), n=1) if inspect.ismodule(found) else []
        hint = f"; did you mean {path.rpartition('.')[0]}.{near[0]}?" if near else ""
        raise ConfigurationError(f"{place}={name} cannot be imported: {error}{hint}") from error
    return found


def trusted_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names that the user trusts in addition to the allow-list (``trusted_targets``).

    Raises
    ------
    ConfigurationError
        ``trusted_targets`` is not a list of names.
    """
    names = config.get(OPTION) or ()
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"{OPTION}={names!r} is no list of packages; write {OPTION}=[package]")
    return tuple(names)


def _targets(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key of every ``_target_``, as it is written on the command line, and its value."""
    for place, value in _leaves(config):
        if place.rpartition(".")[2] == TARGET and value is not None:
            yield place, value


def _leaves(content: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values of all leaves. The value of ``_target_`` is a leaf whatever its type."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            below = f"{place}.{key}" if place else str(key)
            if key == TARGET:
                yield below, value
            else:
                yield from _leaves(value, below)
    elif isinstance(content, list | tuple):
        for index, value in enumerate(content):
            yield from _leaves(value, f"{place}[{index}]")
    else:
        yield place, content


def _allowed_at(place: str) -> tuple[_Package, ...]:
    return ALLOWED.get(place.partition(".")[0].partition("[")[0], ())


def _is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _is_trusted(name: str, trusted: Sequence[str]) -> bool:
    return any(_is_within(name, prefix) for prefix in trusted)


def _check_definition(place: str, name: str, trusted: Sequence[str]) -> None:
    """Refuse a name that resolves to an object defined outside the allowed and the trusted packages."""
    target = locate(place, name)
    if not inspect.isclass(target) and not inspect.isroutine(target):
        raise ConfigurationError(f"{place}={name} is no class or function, but {target!r}")
    module, qualified_name = str(getattr(target, "__module__", None)), str(target.__qualname__)
    defined = f"{module}.{qualified_name}"
    if _is_trusted(defined, trusted):
        return
    is_public = "." not in qualified_name and not qualified_name.startswith("_")
    for package in _allowed_at(place):
        if _is_within(module, package.defined) and is_public and (package.functions or inspect.isclass(target)):
            return
    raise _refusal([(place, name, defined)], trusted)


def _refused(targets: Sequence[tuple[str, str]], trusted: Sequence[str]) -> list[tuple[str, str]]:
    """Return the targets whose names are neither allowed in their section nor trusted."""
    return [
        (place, name)
        for place, name in targets
        if not any(_is_within(name, group.written) for group in _allowed_at(place)) and not _is_trusted(name, trusted)
    ]


def _refusal(refused: Sequence[tuple[str, str, str]], trusted: Sequence[str]) -> ConfigurationError:
    """Build the error for refused targets, each given by its place, its name and its qualified definition."""
    texts = []
    for place, name, defined in refused:
        allowed = [f"{'functions' if kind.functions else 'classes'} of {kind.defined}" for kind in _allowed_at(place)]
        what = f"{place}={name}" + (f" is {defined}, which" if defined != name else "")
        texts.append(
            f"{what} is not among the targets that a configuration may name: below {place.partition('.')[0]} these are "
            f"{' and '.join(allowed) or 'none'}"
        )
    return ConfigurationError(
        f"{'; '.join(texts)}. If you trust that code with what it is given, add "
        f"{_trusting([defined for _, _, defined in refused], trusted)}"
    )


def _trusting(names: Sequence[str], trusted: Sequence[str]) -> str:
    """Return the ``trusted_targets`` option that adds these names to those that the command trusts already."""
    return f"{OPTION}=[{','.join(dict.fromkeys([*trusted, *names]))}]"
