"""Checks of the options of objects that a configuration builds; errors name the option and its value."""

from __future__ import annotations

import inspect
import json
import re
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from gossip.lab.experiments.validated_models import ConfigurationError, keyed, nearest, refusal, shown

FAULTS = (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, OSError, ImportError)
"""The exceptions that a constructor may raise for an invalid value."""

_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)
_OF_HYDRA = ("_target_", "_args_", "_partial_", "_convert_", "_recursive_")


def check_options(place: str, target: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse options that ``target`` does not have, and values that do not match its type hints. Local.

    A parameter without a type hint, or with one that is not plain data, accepts any value; a value from which hydra
    builds an object is not checked. The ConfigurationError names the option below the key ``place``, its value and what
    is allowed.
    """
    parameters = inspect.signature(target).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    try:
        types_ = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError, AttributeError):  # type hints that only a type checker can resolve
        types_ = {}
    for name, value in options.items():
        if name in _OF_HYDRA:
            continue
        if name not in parameters and not takes_any:
            known = [name for name in parameters if name not in ("self", "params")]
            raise ConfigurationError(
                f"{place}.{name}={shown(value)}: {getattr(target, '__name__', target)} has no option {name}"
                f"{nearest(name, known)} Its parameters are {', '.join(known)}"
            )
        if not _has_object(value):
            _check_type(f"{place}.{name}", types_.get(name, Any), value)


def _check_type(key: str, expected: Any, value: Any) -> None:
    """Refuse a value that is not of the expected type; of a type that pydantic does not know, all values pass."""
    try:
        TypeAdapter(expected, config=_STRICT).validate_json(json.dumps(value, default=str))
    except ValidationError as error:
        first = error.errors()[0]
        place = [part for part in first["loc"] if isinstance(part, int)]  # the others are the members of a union
        raise ConfigurationError(refusal(keyed(key, place), first)) from error
    except (PydanticUserError, NameError, TypeError):
        pass


def _has_object(value: Any) -> bool:
    """Whether hydra builds an object from the value, or from a part of it."""
    if isinstance(value, Mapping):
        return "_target_" in value or any(map(_has_object, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_object, value))


@contextmanager
def blaming(place: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Turn a fault within the block into a ConfigurationError that names the option at fault.

    It names the option that the fault's message names, or all ``options``, which are those below the key ``place``, and
    the line of the user's own module in which the fault was raised.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except FAULTS as error:
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, LookupError):
            text = f"{type(error).__name__}: {text}"  # the message of a LookupError alone is just the key
        given = [name for name in options if name not in _OF_HYDRA]
        blamed = named_in(text, given)
        values = ", ".join(
            f"{place}.{name}={shown(options[name])}" for name in ([blamed] if blamed is not None else given)
        )
        where = "".join([f" ({line})" for line in _lines_of_user(str(options.get("_target_", "")), error)][-1:])
        raise ConfigurationError(f"{values or place}: {text}{where}") from error


def _lines_of_user(target: str, error: BaseException) -> Iterator[str]:
    """Yield the lines of the target's module in the traceback; none for modules of this package and of torch."""
    module = target.rpartition(".")[0]
    for frame, number in traceback.walk_tb(error.__traceback__):
        is_users = module.partition(".")[0] not in ("", "gossip", "torch")
        if is_users and frame.f_globals.get("__name__") == module:
            yield f"{frame.f_code.co_filename}, line {number}"


def named_in(text: str, names: Iterable[str]) -> str | None:
    """Return the one of ``names`` that occurs first in ``text`` as a whole word; None if none does."""
    places = {name: match.start() for name in names if (match := re.search(rf"(?<![\w.]){name}(?!\w)", text))}
    return min(places, key=places.__getitem__, default=None)
