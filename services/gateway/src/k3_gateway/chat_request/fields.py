"""Reading fields of a JSON object with errors that name the field and what to change.

An explicit null equals an absent field everywhere. Each reader takes the object, the field's name
and the path of the object in the request (`messages[2].`), so that `param` in the error points at
the right place.
"""

import math
from collections.abc import Sequence
from typing import NoReturn, cast

from k3wire.errors import InvalidRequest

JsonObject = dict[str, object]
"""A decoded JSON object."""


def refuse(path: str, what: str) -> NoReturn:
    """Raises `InvalidRequest` for a field.

    Raises:
        InvalidRequest: always.
    """
    raise InvalidRequest(f"'{path}' {what}", param=path)


def as_object(value: object, path: str) -> JsonObject:
    """Checks that a value is a JSON object."""
    if not isinstance(value, dict):
        refuse(path, f"must be an object, not {kind_of(value)}")
    return cast("JsonObject", value)


def as_list(value: object, path: str) -> list[object]:
    """Checks that a value is a JSON array."""
    if not isinstance(value, list):
        refuse(path, f"must be an array, not {kind_of(value)}")
    return cast("list[object]", value)


def as_string(value: object, path: str) -> str:
    """Checks that a value is a string."""
    if not isinstance(value, str):
        refuse(path, f"must be a string, not {kind_of(value)}")
    return value


def kind_of(value: object) -> str:
    """Names a JSON type for an error message."""
    names = {"bool": "a boolean", "int": "an integer", "float": "a number", "str": "a string"}
    names |= {"list": "an array", "dict": "an object", "NoneType": "null"}
    return names.get(type(value).__name__, "another type")


def read_string(fields: JsonObject, name: str, default: str = "", *, path: str = "") -> str:
    """Reads a string, or the default where absent."""
    value = fields.get(name)
    return default if value is None else as_string(value, path + name)


def read_bool(fields: JsonObject, name: str, default: bool, *, path: str = "") -> bool:
    """Reads a boolean, or the default where absent."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        refuse(path + name, f"must be a boolean, not {kind_of(value)}")
    return value


def read_int(fields: JsonObject, name: str, default: int | None, low: int, high: int) -> int | None:
    """Reads an integer within [low, high], or the default where absent."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        is_whole = isinstance(value, float) and value.is_integer()
        if not is_whole:
            refuse(name, f"must be an integer, not {kind_of(value)}")
    number = int(cast("int | float", value))
    if not low <= number <= high:
        refuse(name, f"must be between {low} and {high}, not {str(number)[:24]}")
    return number


def read_number(
    fields: JsonObject,
    name: str,
    default: float,
    bounds: tuple[float, float],
    *,
    excludes_low: bool = False,
) -> float:
    """Reads a number within bounds, or the default where absent."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(name, f"must be a number, not {kind_of(value)}")
    low, high = bounds
    try:
        number = float(value)
    except OverflowError:
        # JSON's integers have no end.
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high or (excludes_low and number == low):
        bracket = "(" if excludes_low else "["
        refuse(name, f"must be in {bracket}{low:g}, {high:g}], not {number:g}")
    return number


def read_choice(
    fields: JsonObject, name: str, default: str, choices: Sequence[str], *, path: str = ""
) -> str:
    """Reads one of some strings, or the default where absent."""
    value = fields.get(name)
    if value is None:
        return default
    text = as_string(value, path + name)
    if text not in choices:
        refuse(path + name, f"must be one of {', '.join(choices)}, not {text[:40]!r}")
    return text
