"""Compares a tree of expectations with a tree of results."""

from collections.abc import Mapping
from typing import Any, cast

from k3core.simulate.scenario_file import ScenarioError

# Results and expectations are JSON; every value is looked at before it is used.
Json = Any

_OPERATORS = {"min", "max", "in", "contains", "lacks"}


def failures(expected: Mapping[str, Json], actual: Mapping[str, Json], path: str = "") -> list[str]:
    """Every expectation that does not hold, as a sentence; empty if all do.

    Raises:
        ScenarioError: on an operator with a value that nothing can be compared with.
    """
    found: list[str] = []
    for key, wanted in expected.items():
        where = f"{path}.{key}" if path else key
        if key not in actual:
            found.append(f"{where}: no such result; there are {sorted(actual)}")
            continue
        found += _compare(wanted, actual[key], where)
    return found


def _compare(wanted: Json, value: Json, where: str) -> list[str]:
    if isinstance(wanted, dict):
        rules = cast("dict[str, Json]", wanted)
        if rules and set(rules) <= _OPERATORS and not isinstance(value, dict):
            for name, operand in rules.items():
                _check_operand(name, operand, where)
            return [
                f"{where}: {value!r} does not meet {name} {operand!r}"
                for name, operand in rules.items()
                if not _holds(name, operand, value)
            ]
        if isinstance(value, dict):
            return failures(rules, cast("dict[str, Json]", value), where)
        return [f"{where}: {value!r} is not an object; operators are {sorted(_OPERATORS)}"]
    if isinstance(wanted, list) and isinstance(value, list):
        return [] if wanted == value else [f"{where}: {value!r} is not {wanted!r}"]
    if isinstance(wanted, bool) is not isinstance(value, bool) or wanted != value:
        return [f"{where}: {value!r} is not {wanted!r}"]
    return []


def _check_operand(name: str, operand: Json, where: str) -> None:
    if name in ("min", "max") and not _is_number(operand):
        raise ScenarioError(f"{where}: {name} takes a number, not {operand!r}")
    if name == "in" and not isinstance(operand, list):
        raise ScenarioError(f"{where}: in takes a list, not {operand!r}")


def _holds(name: str, operand: Json, value: Json) -> bool:
    match name:
        case "min":
            return _is_number(value) and value >= operand
        case "max":
            return _is_number(value) and value <= operand
        case "in":
            return value in operand
        case "contains":
            return isinstance(value, list) and all(each in value for each in _several(operand))
        case _:
            return isinstance(value, list) and not any(each in value for each in _several(operand))


def _several(operand: Json) -> list[Json]:
    return cast("list[Json]", operand) if isinstance(operand, list) else [operand]


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
