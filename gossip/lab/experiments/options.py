"""Checks of the options of objects that a configuration builds; errors name the option and its value."""

from __future__ import annotations

import inspect
import json
import re
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema

from gossip.lab.experiments.validated_models import ConfigurationError, in_words, nearest, shown

FAULTS = (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, OSError, ImportError)
"""The exceptions that a constructor may raise for an invalid value."""

_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)
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
        adapter = _adapter(types_.get(name, Any))
        if not _has_object(value) and not _fits(value, adapter):
            assert adapter is not None
            words = in_words(adapter.json_schema(schema_generator=_PlainSchema))
            raise ConfigurationError(f"{place}.{name} must be {words}, got {value!r}")


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


def _adapter(expected: Any) -> TypeAdapter[Any] | None:
    """Return what validates values of a type; None for a type of which pydantic knows nothing."""
    try:
        return TypeAdapter(expected, config=_STRICT)
    except (PydanticUserError, NameError, TypeError):
        return None


def _fits(value: Any, adapter: TypeAdapter[Any] | None) -> bool:
    try:
        if adapter is not None:
            adapter.validate_json(json.dumps(value, default=str))
    except ValidationError:
        return False
    return True


class _PlainSchema(GenerateJsonSchema):
    """Leaves out the members of a union that are not plain data."""

    def handle_invalid_for_json_schema(self, *_: Any) -> dict[str, Any]:
        return {}
