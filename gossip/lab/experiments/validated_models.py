"""Pydantic models for settings and documents, and what is wrong with a user's configuration as one line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from topologies.registry import nearest_match

M = TypeVar("M", bound=BaseModel)


class ConfigurationError(ValueError):
    """The user's configuration cannot be run; the message is one line with the reason and the alternative."""


class Model(BaseModel):
    """A model whose values are exactly of the declared types, which has no other keys, and which does not change."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", validate_by_name=True, allow_inf_nan=False)


class OneOf:
    """Annotation of a text that must be one of these names; :func:`read` suggests the closest of them."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(self._names)


def read(model: type[M], content: Mapping[str, Any], path: str = "", whole: str = "the configuration") -> M:
    """Return a section of a resolved configuration, or another document, as a model.

    ``content`` are plain values, as in JSON. Messages name them by ``path``, the dotted key of the section (empty for a
    whole configuration), and call that of which it is a part ``whole``. A ConfigurationError is about the first unknown
    key or else the first value that is missing, of the wrong type or out of range.
    """
    try:
        return model.model_validate_json(json.dumps(content))
    except ValidationError as error:
        found = error.errors()
        unknown = [each for each in found if each["type"] == "extra_forbidden"]  # what is missing may be misspelt there
        raise ConfigurationError(_line(model, [*unknown, *found][0], path, whole)) from error


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


def _line(model: type[BaseModel], error: ErrorDetails, path: str, whole: str) -> str:
    key = keyed(path, error["loc"])
    if error["type"] == "value_error":  # of a validator, which says it in its own words
        words, (parent, dot, last) = str(error["ctx"]["error"]), key.rpartition(".")
        if not error["loc"]:  # of the whole section, whose words begin with one of its keys
            return f"{path}.{words}" if path else words
        name = last.partition("[")[0]
        return f"{parent}{dot}{words}" if words.startswith((f"{name} ", f"{name}.")) else f"{key}: {words}"
    if error["type"] == "missing":
        return f"{whole} has no key {key}; set {key}=..."
    if error["type"] == "extra_forbidden":
        siblings = [field.alias or name for name, field in model.model_fields.items()] if len(error["loc"]) == 1 else ()
        return f"{whole} has no key {key}{nearest(key, [keyed(path, [name]) for name in siblings])}"
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
