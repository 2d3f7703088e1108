"""Reads scenario files: every key is known by name or refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, cast, get_args

from k3core.cache.hashing import namespace_digest
from k3core.cache.spec import (
    CacheConfig,
    CacheError,
    Codec,
    Draft,
    Eviction,
    ExportMode,
    Memory,
    Promotion,
    Retention,
)
from k3core.simulate.streams import Image, Mark, Segment, Slice

# JSON as it comes from the file; every value is looked at before it is used.
Json = Any

CONFIG_KEYS = {
    "unit",
    "page_units",
    "pages",
    "slots",
    "checkpoint_grid",
    "export_alignment",
    "export_mode",
    "chunk_tokens",
    "retention",
    "promotion",
    "draft",
    "path_cap",
    "codec",
    "partial_hits",
    "encoder_tokens",
    # Ours, beyond the published format.
    "eviction",
    "memory",
    "max_rows",
    "host_pages",
    "state_pages",
    "draft_tokens",
    "namespace",
}
REQUEST_KEYS = {"prompt", "output", "salt", "adapter", "accepted", "max_new", "hold", "times"}
STEP_KEYS = {
    "submit",
    "step",
    "run",
    "finish",
    "abort",
    "preempt",
    "evict",
    "lookup",
    "remote",
    "transfer",
    "compact",
    "reset",
    "release",
    "expect",
    # Ours, beyond the published format.
    "begin",
    "commit",
}
_CASE_KEYS = {"name", "config", "steps", "comment", "refused"}
_RETENTION_NAMES = ("prompt_end", "unit_end", "dense", "opportunistic")
# Tokens between two places of a pass at which the KDA kernel can leave a state.
_KERNEL_ALIGNMENT = 16
_RETENTION_KEYS = {"interval", "decode_grid"}


class ScenarioError(ValueError):
    """A scenario that cannot be run; names the case and the key."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its verb, the verb's value, and the other keys of its object."""

    verb: str
    value: Json
    options: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Case:
    """One case of a file.

    Attributes:
        cache: checked, unless it is to be refused.
        chunk_tokens: budgets of a step, used in turn.
        namespace: what the cache's digests are rooted in.
        refused: words that the refusal of `cache` must hold; () if it is to be accepted.
    """

    name: str
    cache: CacheConfig
    chunk_tokens: tuple[int, ...]
    encoder_tokens: int
    max_rows: int
    steps: tuple[Step, ...]
    namespace: bytes = b"scenario"
    refused: tuple[str, ...] = ()

    @property
    def has_remote(self) -> bool:
        """Whether any step speaks of a remote tier."""
        return any(step.verb == "remote" for step in self.steps)


def read_cases(document: Json) -> list[Case]:
    """The cases of one parsed file: an object, or a list of objects.

    Raises:
        ScenarioError: naming what is wrong and where.
    """
    items = cast("list[Json]", document) if isinstance(document, list) else [document]
    return [_case(item, number) for number, item in enumerate(items)]


def segments(value: Json, where: str) -> list[Segment]:
    """A prompt or an output.

    Raises:
        ScenarioError: on a segment that is none of the three kinds.
    """
    if not isinstance(value, list):
        raise ScenarioError(f"{where}: a list of segments is wanted, not {value!r}")
    return [_segment(each, where) for each in cast("list[Json]", value)]


def keys_known(value: Json, known: set[str], where: str) -> dict[str, Json]:
    """The object itself, if every key is known.

    Raises:
        ScenarioError: naming the first key that is not.
    """
    if not isinstance(value, dict):
        raise ScenarioError(f"{where}: an object is wanted, not {value!r}")
    found = cast("dict[str, Json]", value)
    for key in found:
        if key not in known:
            raise ScenarioError(f"{where}: unknown key {key!r}; known are {sorted(known)}")
    return found


def whole(value: Json, where: str, least: int = 0) -> int:
    """A whole number of at least `least`.

    Raises:
        ScenarioError: if it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ScenarioError(f"{where}: a whole number of at least {least} is wanted, not {value!r}")
    return value


def whole_numbers(value: Json, where: str) -> tuple[int, ...]:
    """A list of whole numbers of at least 0.

    Raises:
        ScenarioError: if it is none.
    """
    if not isinstance(value, list):
        raise ScenarioError(f"{where}: a list of whole numbers is wanted, not {value!r}")
    return tuple(whole(each, where) for each in cast("list[Json]", value))


def _case(item: Json, number: int) -> Case:
    found = keys_known(item, _CASE_KEYS, f"case {number}")
    name = str(found.get("name", f"case {number}"))
    config = keys_known(found.get("config", {}), CONFIG_KEYS, f"{name}: config")
    if not isinstance(found.get("steps"), list):
        raise ScenarioError(f"{name}: steps must be a list")
    refused = _refused(found, name)
    try:
        cache = _cache(config, name)
        if not refused:
            cache.check()
    except CacheError as error:
        raise ScenarioError(f"{name}: {error}") from error
    chunk = config.get("chunk_tokens", 8192)
    sizes = cast("list[Json]", chunk) if isinstance(chunk, list) else [chunk]
    if not sizes:
        raise ScenarioError(f"{name}: chunk_tokens is empty")
    return Case(
        name=name,
        cache=cache,
        chunk_tokens=tuple(whole(size, f"{name}: chunk_tokens", 1) for size in sizes),
        encoder_tokens=whole(config.get("encoder_tokens", 65536), f"{name}: encoder_tokens", 1),
        max_rows=whole(config.get("max_rows", 256), f"{name}: max_rows", 1),
        steps=tuple(_step(each, f"{name}: step {i}") for i, each in enumerate(found["steps"])),
        namespace=_namespace(config.get("namespace"), name),
        refused=refused,
    )


def _refused(case: dict[str, Json], name: str) -> tuple[str, ...]:
    """Words that the refusal of a case's configuration must hold."""
    if "refused" not in case:
        return ()
    words = case["refused"]
    if not isinstance(words, list) or not words:
        raise ScenarioError(f"{name}: refused lists what the refusal must name, not {words!r}")
    if case["steps"]:
        raise ScenarioError(f"{name}: a configuration that is refused runs no steps")
    return tuple(str(each) for each in cast("list[Json]", words))


def _namespace(value: Json, name: str) -> bytes:
    """Named fields of a model's identity, as the workers frame and hash them."""
    if value is None:
        return b"scenario"
    if not isinstance(value, dict) or not value:
        raise ScenarioError(f"{name}: namespace is an object of named fields, not {value!r}")
    fields = cast("dict[str, Json]", value)
    return namespace_digest([(key, str(each)) for key, each in fields.items()])


def _cache(config: dict[str, Json], name: str) -> CacheConfig:
    def number(key: str, default: int, least: int = 1) -> int:
        return whole(config.get(key, default), f"{name}: {key}", least)

    def choice(key: str, default: str, known: Any) -> str:
        value = config.get(key, default)
        if value not in get_args(known):
            raise ScenarioError(f"{name}: {key} is one of {get_args(known)}, not {value!r}")
        return value

    cap = config.get("path_cap", -1)
    if isinstance(cap, bool) or not isinstance(cap, int):
        raise ScenarioError(f"{name}: path_cap is a whole number, not {cap!r}")
    partial = config.get("partial_hits", True)
    if not isinstance(partial, bool):
        raise ScenarioError(f"{name}: partial_hits is true or false, not {partial!r}")
    unit, page_units = number("unit", 128), number("page_units", 12)
    draft, replay_tokens = _draft(config.get("draft", "off"), name)
    return CacheConfig(
        unit_tokens=unit,
        page_units=page_units,
        num_pages=number("pages", 1024),
        num_slots=number("slots", 256),
        state_groups=number("state_pages", 1),
        checkpoint_grid=number("checkpoint_grid", unit * page_units),
        # The kernel's, or less: a case that does not speak of alignment loses no unit to it.
        export_alignment=number("export_alignment", gcd(_KERNEL_ALIGNMENT, unit)),
        export_mode=cast("ExportMode", choice("export_mode", "in_pass", ExportMode)),
        partial_hits=partial,
        retention=read_retention(config.get("retention", ["prompt_end"]), name),
        promotion=cast("Promotion", choice("promotion", "second_hit", Promotion)),
        draft=draft,
        replay_tokens=replay_tokens,
        draft_tokens=number("draft_tokens", 0, 0),
        path_cap=cap,
        codec=cast("Codec", choice("codec", "raw", Codec)),
        eviction=cast("Eviction", choice("eviction", "lru", Eviction)),
        memory=cast("Memory", choice("memory", "two_pools", Memory)),
        page_bytes=unit * page_units * 8,
        host_bytes=number("host_pages", 0, 0) * unit * page_units * 8,
    )


def _draft(value: Json, name: str) -> tuple[Draft, int]:
    """The policy, and how many tokens one that replays leaves to compute."""
    if isinstance(value, dict):
        found = keys_known(value, {"replay"}, f"{name}: draft")
        return "replay", whole(found.get("replay"), f"{name}: draft replay", 1)
    known = tuple(each for each in get_args(Draft) if each != "replay")
    if value not in known:
        raise ScenarioError(f"{name}: draft is one of {known} or {{'replay': N}}, not {value!r}")
    return value, 1


def read_retention(value: Json, name: str) -> Retention:
    """The union that a list of rules stands for.

    Raises:
        ScenarioError: naming a rule that is not known.
    """
    items = cast("list[Json]", value) if isinstance(value, list) else [value]
    names: set[str] = set()
    intervals: list[int] = []
    decode_grid = 0
    for item in items:
        if isinstance(item, str):
            if item not in _RETENTION_NAMES:
                raise ScenarioError(
                    f"{name}: unknown retention {item!r}; known are {_RETENTION_NAMES}"
                )
            names.add(item)
            continue
        rule = keys_known(item, _RETENTION_KEYS, f"{name}: retention")
        for key, step in rule.items():
            number = whole(step, f"{name}: retention {key}", 1)
            if key == "interval":
                intervals.append(number)
            else:
                decode_grid = number
    return Retention(
        prompt_end="prompt_end" in names,
        unit_end="unit_end" in names,
        dense="dense" in names,
        opportunistic="opportunistic" in names,
        intervals=tuple(intervals),
        decode_grid=decode_grid,
    )


def _step(item: Json, where: str) -> Step:
    if not isinstance(item, dict):
        raise ScenarioError(f"{where}: an object is wanted, not {item!r}")
    found = cast("dict[str, Json]", item)
    verbs = [key for key in found if key in STEP_KEYS]
    if len(verbs) != 1:
        unknown = sorted(set(found) - STEP_KEYS - REQUEST_KEYS)
        raise ScenarioError(f"{where}: wants one of {sorted(STEP_KEYS)}; found {unknown or verbs}")
    verb = verbs[0]
    allowed = {verb} | (REQUEST_KEYS if verb == "submit" else set[str]())
    keys_known(found, allowed, where)
    options = {key: value for key, value in found.items() if key != verb}
    return Step(verb, found[verb], options)


def _segment(value: Json, where: str) -> Segment:
    if isinstance(value, list):
        items = cast("list[Json]", value)
        if len(items) != 3 or not isinstance(items[0], str | int):
            raise ScenarioError(f"{where}: a slice is [stream, start, length], not {value!r}")
        return Slice(str(items[0]), whole(items[1], where), whole(items[2], where))
    found = keys_known(value, {"image", "tokens", "mark"}, where)
    if set(found) == {"mark"}:
        return Mark()
    if set(found) == {"image", "tokens"}:
        name = found["image"]
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise ScenarioError(f"{where}: a picture's id is a text or a number, not {name!r}")
        return Image(name, whole(found["tokens"], where, 1))
    raise ScenarioError(f"{where}: a segment is a slice, a picture or a mark, not {value!r}")
