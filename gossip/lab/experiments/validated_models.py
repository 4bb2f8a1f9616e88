"""Pydantic models for settings and documents, and what is wrong with a user's configuration as one line."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, core_schema

M = TypeVar("M", bound=BaseModel)
_NUMBERS = {"integer": "an integer", "number": "a finite number"}
_PLURALS = {"integer": "integers", "number": "numbers", "string": "texts"}
_TYPES = {"boolean": "true or false", "string": "a text", "object": "a mapping", "null": "null"}


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

    Parameters
    ----------
    model : type
    content : mapping
        Plain values, as in JSON.
    path : str
        The dotted key of the section, which the messages name; empty for a whole configuration.
    whole : str
        What the messages call that of which the path is a part.

    Raises
    ------
    ConfigurationError
        A value is missing, unknown, of the wrong type or out of range; the message is about the
        first unknown key, or else the first such value.
    """
    try:
        return model.model_validate_json(json.dumps(content))
    except ValidationError as error:
        found = error.errors()
        unknown = [each for each in found if each["type"] == "extra_forbidden"]  # what is missing may be misspelt there
        raise ConfigurationError(_line(model, [*unknown, *found][0], path, whole)) from error


def nearest(name: str, names: Sequence[str]) -> str:
    """Return the words "; did you mean x?" with the closest match to ``name``, or a full stop if there is none."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else "."


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key.

    Raises
    ------
    ConfigurationError
        The configuration has no such key.
    """
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ConfigurationError(f"the configuration has no key {key}; set {key}=...")
        value = value[part]
    return value


def _line(model: type[BaseModel], error: ErrorDetails, path: str, whole: str) -> str:
    place = error["loc"][:-1] if error["loc"] and isinstance(error["loc"][-1], int) else error["loc"]
    key = path + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    key = key.removeprefix(".")
    value, schema = error["input"], _schema_at(model.model_json_schema(), error["loc"])
    if error["type"] == "value_error":  # of a validator, which says it in its own words
        words, (parent, dot, name) = str(error["ctx"]["error"]), key.rpartition(".")
        if not error["loc"]:  # of the whole section, whose words begin with one of its keys
            return f"{path}.{words}" if path else words
        return f"{parent}{dot}{words}" if words.startswith((f"{name} ", f"{name}.")) else f"{key}: {words}"
    if error["type"] == "missing":
        return f"{whole} has no key {key}; set {key}=..."
    if error["type"] == "extra_forbidden":
        siblings = _schema_at(model.model_json_schema(), error["loc"][:-1]).get("properties", {})
        parent = key.removesuffix(str(error["loc"][-1]))
        return f"{whole} has no key {key}{nearest(key, [parent + name for name in siblings])}"
    if names := [str(name) for name in schema.get("enum", [schema["const"]] if "const" in schema else [])]:
        return f"there is no {key}={value}{nearest(str(value), names)} Available: {', '.join(names)}"
    wanted, example = in_words(schema) or error["msg"], ""
    if "examples" in schema:
        wanted += f" of {', '.join(schema['properties'])}"
        example = f"; for example {key}={schema['examples'][0]}"
    return f"{key} must be {wanted}, got {value!r}{example}"


def _schema_at(root: Mapping[str, Any], location: Sequence[int | str]) -> dict[str, Any]:
    """Return the JSON schema of the value at a location."""

    def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
        return root["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema

    schema: Mapping[str, Any] = root
    for part in location:
        options = [option for option in schema.get("anyOf", ()) if option != {"type": "null"}]
        if len(options) == 1:
            schema = resolved(options[0])
        if isinstance(part, int):
            inner = schema["prefixItems"][part] if "prefixItems" in schema else schema.get("items")
        else:
            inner = schema.get("properties", {}).get(part, schema.get("additionalProperties"))
        if isinstance(inner, Mapping):  # otherwise it is part of a union, or of a mapping with any values
            schema = resolved(inner)
    return dict(schema)


def in_words(schema: Mapping[str, Any]) -> str:
    """Return what a value of a JSON schema may be; empty for one that may be anything."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(filter(None, map(in_words, schema["anyOf"]))))
    if "enum" in schema or "const" in schema:
        return " or ".join(map(shown, schema.get("enum", [schema.get("const")])))
    kind = "object" if "$ref" in schema else str(schema.get("type", ""))
    least, most = schema.get("minimum"), schema.get("maximum")
    if kind == "array":
        return _list_in_words(schema)
    if kind not in _NUMBERS:
        return "a path" if schema.get("format") == "path" else _TYPES.get(kind, "")
    if schema.get("exclusiveMinimum") == 0:
        return f"a positive {kind}"
    if least is not None and most is not None:
        return f"{_NUMBERS[kind]} between {least} and {most}"
    return _NUMBERS[kind] + (f" of at least {least}" if least is not None else "")


def _list_in_words(schema: Mapping[str, Any]) -> str:
    item = [*schema.get("prefixItems", ()), schema.get("items", {})][0]
    plural = _PLURALS.get(item.get("anyOf", [item])[0].get("type", ""), "values")
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if least == 1 and most is None:
        return "a list of at least one value"
    if least:
        return f"a list of {least} {plural}" if least == most else f"a list of at least {least} {plural}"
    return "a list" if plural == "values" else f"a list of {plural}"


def shown(value: Any) -> str:
    """Format a value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{','.join(map(shown, value))}]" if isinstance(value, list | tuple) else str(value)
