"""The allow-list for ``_target_``: classes and functions that are harmless for any arguments.

A target is imported and called, and a configuration may come from an untrusted source: with ``resume=FOLDER`` it is
read from that folder.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gossip.lab.experiments.validated_models import ConfigurationError

OPTION = "trusted_targets"
"""The option by which a user extends the allow-list. It is read from the command line, never from a resumed folder."""

TARGET = "_target_"


class _Package(NamedTuple):
    """Definitions that a target may name: classes and, with ``functions``, functions.

    The target begins with ``written``, outside of which nothing is imported, and the object must be ``defined`` in this
    module, or package of modules: a dotted name can lead to anything that a module has imported, as
    ``torch.optim.adam.torch.load`` does.
    """

    written: str
    defined: str
    functions: bool = False


_OPTIMIZERS = _Package("torch.optim", "torch.optim")

ALLOWED: Mapping[str, tuple[_Package, ...]] = {
    "data": (_Package("gossip", "gossip.lab.experiments.datasets", functions=True),),
    "model": (_Package("gossip", "gossip.lab.experiments.models"), _Package("torch.nn", "torch.nn.modules")),
    "wrapper": (_Package("gossip", "gossip.wrapper"),),
    "algorithm": (_Package("gossip", "gossip.algorithms"),),
    "compression": (_Package("gossip", "gossip.compression"),),
    "optimizer": (_OPTIMIZERS, _Package("gossip", "gossip.optimizers.accum_adam")),
    "scheduler": (_Package("gossip", "gossip.lab.experiments.lr_schedules", functions=True), _OPTIMIZERS),
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
    if refused := _refused(found, trusted):
        raise _refusal({place: (name, name) for place, name in refused}, trusted)
    for place, name in found:
        if name in trusted:
            continue
        target = locate(place, name)
        if not inspect.isclass(target) and not inspect.isroutine(target):
            raise ConfigurationError(f"{place}={name} is no class or function, but {target!r}")
        defined = f"{getattr(target, '__module__', None)}.{target.__qualname__}"
        if not _is_within(defined, trusted) and not _is_allowed(place, target):
            raise _refusal({place: (name, defined)}, trusted)
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
    refused = [name for name in names if name not in (asked.get("imports") or ()) and not _is_within(name, trusted)]
    if refused:
        targets = [name for _, name in _refused(_targets(config), trusted)]
        and_targets = f" and names {', '.join(targets)}" if targets else ""
        raise ConfigurationError(
            f"{path} has imports=[{','.join(refused)}], which would be run here{and_targets}; if you trust that code, "
            f"add {_trusting([*refused, *targets], trusted)}"
        )


def locate(place: str, name: str) -> Any:
    """Import and return the object that a target names."""
    path, _, others = name.partition(".")
    found: Any = None
    try:
        found = importlib.import_module(path)
        for part in filter(None, others.split(".")):
            path = f"{path}.{part}"
            if inspect.ismodule(found) and not hasattr(found, part):
                found = importlib.import_module(path)
            else:
                found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        above, _, last = path.rpartition(".")
        near = difflib.get_close_matches(last, dir(found), n=1) if inspect.ismodule(found) else []
        hint = f"; did you mean {above}.{near[0]}?" if near else ""
        if not above:
            hint = "; put its folder on the path, PYTHONPATH=folder"
        raise ConfigurationError(f"{place}={name} cannot be imported: {error}{hint}") from error
    return found


def trusted_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names that the user trusts in addition to the allow-list (``trusted_targets``)."""
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


def _is_within(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _is_allowed(place: str, target: Any) -> bool:
    """Whether an object is a public class or function of a package that is allowed at this place."""
    module, is_public = str(getattr(target, "__module__", None)), re.fullmatch(r"[^._][^.]*", target.__qualname__)
    return is_public is not None and any(
        _is_within(module, [package.defined]) and (package.functions or inspect.isclass(target))
        for package in _allowed_at(place)
    )


def _refused(targets: Iterable[tuple[str, Any]], trusted: Sequence[str]) -> list[tuple[str, str]]:
    """Return the targets whose names are neither allowed in their section nor trusted."""
    return [
        (place, str(name))
        for place, name in targets
        if not _is_within(str(name), [*trusted, *(package.written for package in _allowed_at(place))])
    ]


def _refusal(refused: Mapping[str, tuple[str, str]], trusted: Sequence[str]) -> ConfigurationError:
    """Build the error for refused targets, given by place as their names and their qualified definitions."""
    texts = []
    for place, (name, defined) in refused.items():
        allowed = [f"{'functions' if kind.functions else 'classes'} of {kind.defined}" for kind in _allowed_at(place)]
        what = f"{place}={name}" + (f" is {defined}, which" if defined != name else "")
        texts.append(
            f"{what} is not among the targets that a configuration may name: below {place.partition('.')[0]} these are "
            f"{' and '.join(allowed) or 'none'}"
        )
    return ConfigurationError(
        f"{'; '.join(texts)}. If you trust that code with what it is given, add "
        f"{_trusting([defined for _, defined in refused.values()], trusted)}"
    )


def _trusting(names: Sequence[str], trusted: Sequence[str]) -> str:
    """Return the ``trusted_targets`` option that adds these names to those that the command trusts already."""
    return f"{OPTION}=[{','.join(dict.fromkeys([*trusted, *names]))}]"
