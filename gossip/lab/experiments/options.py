"""Checks of the options of objects that a configuration builds; errors name the option and its value."""

from __future__ import annotations

import collections.abc
import inspect
import math
import os
import re
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gossip.lab.experiments.validated_models import ConfigurationError, nearest

FAULTS = (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, OSError, ImportError)
"""The exceptions that a constructor may raise for an invalid value."""

_OF_HYDRA = ("_target_", "_args_", "_partial_", "_convert_", "_recursive_")
_ALLOWED_BY_TORCH = {
    "lr": "a number of at least 0",
    "momentum": "a number of at least 0",
    "weight_decay": "a number of at least 0",
    "eps": "a number of at least 0",
    "betas": "a list of 2 numbers, each of at least 0 and below 1",
}
"""The permitted values of optimizer options, which the error messages of torch.optim do not state."""


def check_options(place: str, target: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse options that ``target`` does not have, and values that do not match its type hints. Local.

    Parameters
    ----------
    place : str
        The dotted key of the options in the configuration.
    target : callable
        The function or class whose parameters the options are. A parameter without a type hint, or with one that is
        not plain data, accepts any value.
    options : mapping
        The options as plain data; a value from which hydra builds an object is not checked.

    Raises
    ------
    ConfigurationError
        An option is refused. The message names the option, its value and what is allowed.
    """
    parameters = inspect.signature(target).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    types_ = _types_of(target)
    for name, value in options.items():
        if name in _OF_HYDRA:
            continue
        if name not in parameters and not takes_any:
            known = [name for name in parameters if name not in ("self", "params")]
            raise ConfigurationError(
                f"{place}.{name}={shown(value)}: {getattr(target, '__name__', target)} has no option {name}"
                f"{nearest(name, known)} Its parameters are {', '.join(known)}"
            )
        expected = types_.get(name, Any)
        if not _has_object(value) and not _fits(value, expected):
            raise ConfigurationError(f"{place}.{name} must be {_words(expected)}, got {value!r}")


def blaming(
    place: str, options: Mapping[str, Any], error: BaseException, works_without: Callable[[str], bool]
) -> ConfigurationError:
    """Build an error that names the option at fault for ``error``.

    Parameters
    ----------
    place : str
        The dotted key of the options in the configuration.
    options : mapping
        The options as they were given.
    error : exception
        The exception that was raised when the options were used.
    works_without : callable
        ``(option) -> bool``: whether nothing is raised if the option takes its default value. Called only if the
        message of ``error`` names no option.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, LookupError):
        text = f"{type(error).__name__}: {text}"  # the message of a LookupError alone is just the key
    given = [name for name in options if name not in _OF_HYDRA]
    blamed = named_in(text, given) or next(filter(works_without, given), None)
    module = str(options.get("_target_", "")).rpartition(".")[0]
    text += "".join([f" ({line})" for line in _lines_of(module, error)][-1:])
    if blamed is None:
        values = ", ".join(f"{place}.{name}={shown(options[name])}" for name in given)
        return ConfigurationError(f"{values or place}: {text}")
    allowed = _ALLOWED_BY_TORCH.get(blamed) if place == "optimizer" and text.startswith("Invalid") else None
    rule = f"; it must be {allowed}" if allowed is not None else ""
    return ConfigurationError(f"{place}.{blamed}={shown(options[blamed])}: {text}{rule}")


def _lines_of(module: str, error: BaseException) -> Iterator[str]:
    """Yield the lines of a user's module in the traceback; none for modules of this package and of torch."""
    if module.partition(".")[0] in ("", "gossip", "torch"):
        return
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == module:
            yield f"{frame.f_code.co_filename}, line {number}"


def named_in(text: str, names: Iterable[str]) -> str | None:
    """Return the one of ``names`` that occurs first in ``text`` as a whole word; None if none does."""
    places = {name: match.start() for name in names if (match := re.search(rf"(?<![\w.]){name}(?!\w)", text))}
    return min(places, key=places.__getitem__, default=None)


def shown(value: Any) -> str:
    """Format a value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{','.join(map(shown, value))}]" if isinstance(value, list | tuple) else str(value)


def _types_of(target: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError, AttributeError):  # type hints that only a type checker can resolve
        return {}


def _has_object(value: Any) -> bool:
    """Whether hydra builds an object from the value, or from a part of it."""
    if isinstance(value, Mapping):
        return "_target_" in value or any(map(_has_object, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_object, value))


def _fits(value: Any, expected: Any) -> bool:
    origin, inner = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, kind) for kind in inner)
    if origin is typing.Literal:
        return value in inner
    if expected in (None, type(None)):
        return value is None
    if expected in (int, float):
        return _is_number(value, expected)
    if expected in (bool, str):
        return isinstance(value, expected)
    if _is_path(expected):
        return isinstance(value, str)
    if _is_sequence(origin or expected):
        return isinstance(value, list | tuple) and _elements_fit(value, origin, inner)
    if inspect.isclass(origin or expected) and (origin or expected).__module__ != "typing":
        return isinstance(value, origin or expected) or (origin or expected) is object
    return True


def _is_number(value: Any, expected: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or (expected is float and math.isfinite(value))


def _is_path(expected: Any) -> bool:
    return inspect.isclass(expected) and issubclass(expected, os.PathLike)


def _is_sequence(kind: Any) -> bool:
    return kind in (list, tuple, collections.abc.Sequence, collections.abc.Iterable)


def _elements_fit(value: Sequence[Any], origin: Any, inner: Sequence[Any]) -> bool:
    if not inner:
        return True
    if origin is tuple and Ellipsis not in inner:
        return len(value) == len(inner) and all(map(_fits, value, inner))
    return all(_fits(item, inner[0]) for item in value)


def _words(expected: Any) -> str:
    """Describe a type in words; members of a union that are not plain data are omitted."""
    origin, inner = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(words for words in map(_words, inner) if words))
    if origin is typing.Literal:
        return " or ".join(map(shown, inner))
    if _is_path(expected):
        return "a path"
    if _is_sequence(origin or expected):
        kinds: dict[Any, str] = {int: " of integers", float: " of numbers", str: " of texts"}
        count = f" of {len(inner)}" if origin is tuple and Ellipsis not in inner else ""
        element = typing.get_args(inner[0])[0] if inner and typing.get_args(inner[0]) else inner[0] if inner else None
        return f"a list{count}{kinds.get(element, '').removeprefix(' of') if count else kinds.get(element, '')}"
    simple = {int: "an integer", float: "a finite number", bool: "true or false", str: "a text", type(None): "null"}
    return next((words for kind, words in simple.items() if kind == expected), "")
