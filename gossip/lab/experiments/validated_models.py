"""What is wrong with a user's configuration as one line: with settings, as pydantic models, and options of objects."""

import inspect
import json
import re
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetPydanticSchema, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, core_schema

from topologies.registry import nearest_match

M = TypeVar("M", bound=BaseModel)

FAULTS = (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, OSError, ImportError)
"""The exceptions that a constructor may raise for an invalid value."""

_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)
_OF_HYDRA = ("_target_", "_args_", "_partial_", "_convert_", "_recursive_")


class ConfigurationError(ValueError):
    """The user's configuration cannot be run; the message is one line with the reason and the alternative."""


class Model(BaseModel):
    """A model whose values are exactly of the declared types, which has no other keys, and which does not change."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", validate_by_name=True, allow_inf_nan=False)


def OneOf(names: Iterable[str]) -> GetPydanticSchema:
    """Return the annotation of a text that must be one of these names; :func:`read` suggests the closest of them."""
    schema = core_schema.literal_schema(list(names))
    return GetPydanticSchema(lambda *_: schema)


def read(model: type[M], content: Mapping[str, Any], path: str = "") -> M:
    """Return a section of a resolved configuration, or another document, as a model.

    ``content`` are plain values, as in JSON. Messages name them by ``path``, the dotted key of the section (empty for a
    whole configuration). A ConfigurationError is about the first unknown key or else the first value that is missing,
    of the wrong type or out of range.
    """
    try:
        return model.model_validate_json(json.dumps(content))
    except ValidationError as error:
        found = error.errors()
        unknown = [each for each in found if each["type"] == "extra_forbidden"]  # what is missing may be misspelt there
        raise ConfigurationError(_line(model, [*unknown, *found][0], path)) from error


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the words "; did you mean x?" with the closest match to ``name``, or a full stop if there is none."""
    close = nearest_match(name, names)
    return "." if close is None else f"; did you mean {close}?"


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; a ConfigurationError says that there is none."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ConfigurationError(f"the configuration has no key {key}; set {key}=...")
        value = value[part]
    return value


def _line(model: type[BaseModel], error: ErrorDetails, path: str) -> str:
    key = keyed(path, error["loc"])
    if error["type"] == "value_error":  # of a validator, which says it in its own words
        words, (parent, dot, last) = str(error["ctx"]["error"]), key.rpartition(".")
        if not error["loc"]:  # of the whole section, whose words begin with one of its keys
            return f"{path}.{words}" if path else words
        name = last.partition("[")[0]
        return f"{parent}{dot}{words}" if words.startswith((f"{name} ", f"{name}.")) else f"{key}: {words}"
    if error["type"] == "missing":
        return f"the configuration has no key {key}; set {key}=..."
    if error["type"] == "extra_forbidden":
        siblings = [field.alias or name for name, field in model.model_fields.items()] if len(error["loc"]) == 1 else ()
        return f"the configuration has no key {key}{nearest(key, [keyed(path, [name]) for name in siblings])}"
    if error["type"] == "literal_error":
        names = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        return f"there is no {key}={error['input']}{nearest(str(error['input']), names)} Available: {', '.join(names)}"
    if error["type"] == "model_type" and not error["loc"]:
        return f"{key} must be a mapping of {', '.join(model.model_fields)}, got {error['input']!r}"
    return refusal(key, error)


def keyed(path: str, location: Sequence[int | str]) -> str:
    """Return the dotted key of a location below ``path``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return f"{path}{''.join(parts)}".removeprefix(".")


def refusal(key: str, error: ErrorDetails) -> str:
    """Return in the words of pydantic what the value of ``key`` must be."""
    must = re.sub(r"^[A-Z]\w* (should|is)", "must", error["msg"])
    return f"{key} {must}, got {error['input']!r}"


def shown(value: Any) -> str:
    """Format a value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{','.join(map(shown, value))}]" if isinstance(value, list | tuple) else str(value)


def check_options(place: str, target: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse options that ``target`` does not have, and values that do not match its type hints. Local.

    A parameter without a type hint, or with one that is not plain data, accepts any value; a value from which hydra
    builds an object is not checked. The ConfigurationError names the option below the key ``place``, its value and what
    is allowed.
    """
    parameters = inspect.signature(target).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    try:
        types_ = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target, include_extras=True)
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
            check_type(f"{place}.{name}", types_.get(name, Any), value)


def check_type(key: str, expected: Any, value: Any) -> None:
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
        if (blamed := named_in(text, given)) is not None:
            given = [blamed]
        values = ", ".join(f"{place}.{name}={shown(options[name])}" for name in given)
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
