"""The allow-list for ``_target_``: classes and functions that are harmless for any arguments.

A target is imported and called, and a configuration may come from an untrusted source: with ``resume=FOLDER`` it is
read from that folder.
"""

import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
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
    "algorithm": (_Package("gossip", "gossip.algorithms"), _OPTIMIZERS),
    "compression": (_Package("gossip", "gossip.compression"),),
    "optimizer": (
        _OPTIMIZERS,
        _Package("gossip", "gossip.optimizers.accum_adam"),
        _Package("gossip", "gossip.optimizers.muon_adamw"),
    ),
    "scheduler": (_Package("gossip", "gossip.lab.experiments.lr_schedules", functions=True), _OPTIMIZERS),
}
"""The allowed definitions by config section, which apply to nested targets too."""


def check_targets(key: str, section: Mapping[str, Any], trusted: Sequence[str]) -> None:
    """Refuse every ``_target_`` in a config section that is neither allowed there nor trusted. Local.

    Nothing is called, and nothing imported whose name is not allowed or trusted: ``trusted`` are packages, modules,
    classes and functions. Interpolations, which hydra would resolve further, are refused. The ConfigurationError names
    the target, its place, what is allowed there and how to trust it.
    """
    for place, value in _leaves(section, key):
        if place.endswith(f".{TARGET}"):
            if value is not None:
                _check(place, value, ALLOWED[key], trusted)
        elif "${" in str(value):
            raise ConfigurationError(f"{place}={value}: a run's configuration has no ${{...}}; put the value there")


def _check(place: str, name: Any, allowed: Sequence[_Package], trusted: Sequence[str]) -> None:
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigurationError(f"{place}={name!r} is no name of a class or function, as package.module.Name is")
    defined = name
    if _is_within(name, [*trusted, *(package.written for package in allowed)]):
        target = locate(place, name)
        if name in trusted:
            return
        if not inspect.isclass(target) and not inspect.isroutine(target):
            raise ConfigurationError(f"{place}={name} is no class or function, but {target!r}")
        module = str(getattr(target, "__module__", None))
        defined = f"{module}.{target.__qualname__}"
        is_public = re.fullmatch(r"[^._][^.]*", target.__qualname__) is not None
        kinds = [package.defined for package in allowed if package.functions or inspect.isclass(target)]
        if _is_within(defined, trusted) or (is_public and _is_within(module, kinds)):
            return
    kinds = [f"{'functions' if package.functions else 'classes'} of {package.defined}" for package in allowed]
    raise ConfigurationError(
        f"{place}={name}{f' is {defined}, which' if defined != name else ''} is not among the targets that a "
        f"configuration may name: below {place.partition('.')[0]} these are {' and '.join(kinds)}. If you trust that "
        f"code with what it is given, add {trusting([defined], trusted)}"
    )


def check_imports(config: Mapping[str, Any], asked: Mapping[str, Any], path: str) -> None:
    """Refuse modules that a resumed run, whose ``config`` is saved in ``path``, would import. Local.

    Those in ``imports`` or ``trusted_targets`` of the configuration that the present command asks for may be.
    """
    trusted = trusted_names(asked)
    names = [str(name) for name in config.get("imports") or ()]
    refused = [name for name in names if name not in (asked.get("imports") or ()) and not _is_within(name, trusted)]
    if refused:
        raise ConfigurationError(
            f"{path} has imports=[{','.join(refused)}], which would be run here; if you trust that code, add "
            f"{trusting(refused, trusted)}"
        )


def locate(place: str, name: str) -> Any:
    """Import and return the object that a target names."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        hint = "; put its folder on the path, PYTHONPATH=folder" if isinstance(error, ImportError) else ""
        raise ConfigurationError(f"{place}={name} cannot be imported: {error}{hint}") from error


def trusted_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names that the user trusts in addition to the allow-list (``trusted_targets``)."""
    names = config.get(OPTION) or ()
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"{OPTION}={names!r} is no list of packages; write {OPTION}=[package]")
    return tuple(names)


def _leaves(content: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values of all leaves. The value of ``_target_`` is a leaf whatever its type."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from [(f"{place}.{key}", value)] if key == TARGET else _leaves(value, f"{place}.{key}")
    elif isinstance(content, list | tuple):
        for index, value in enumerate(content):
            yield from _leaves(value, f"{place}[{index}]")
    else:
        yield place, content


def _is_within(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def trusting(names: Sequence[str], trusted: Sequence[str]) -> str:
    """Return the ``trusted_targets`` option that adds these names to those that the command trusts already."""
    return f"{OPTION}=[{','.join(dict.fromkeys([*trusted, *names]))}]"
