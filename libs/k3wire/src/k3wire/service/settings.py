"""Settings: environment variables, read once at the start into a frozen struct.

A settings class is a frozen msgspec struct whose fields are annotated with `Setting`: the
variable's whole name, a unit and a sentence. Every service's class includes the shared ones. An
unknown `K3_…` variable, or one whose value does not parse, stops the start; all of them are named
at once.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import msgspec

PREFIX = "K3_"
S = TypeVar("S", bound="CommonSettings")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of one variable.

    Attributes:
        name: the environment variable, `K3_…`.
        meaning: one sentence for the settings page.
        unit: of the value, "" if it has none.
    """

    name: str
    meaning: str
    unit: str = ""


class SettingsError(Exception):
    """The environment cannot be used; the message names every variable at fault."""


class CommonSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every service reads."""

    nats_url: Annotated[str, Setting("K3_NATS_URL", "NATS servers, separated by commas.")] = (
        "nats://127.0.0.1:4222"
    )
    health_host: Annotated[
        str, Setting("K3_HEALTH_HOST", "Address that /health, /ready and /metrics listen on.")
    ] = "127.0.0.1"
    health_port: Annotated[
        int,
        Setting("K3_HEALTH_PORT", "Port of /health, /ready and /metrics; 0 takes a free one."),
    ] = 0
    grace_s: Annotated[
        float, Setting("K3_GRACE_S", "Time that running requests get at a stop.", "s")
    ] = 30.0
    log_level: Annotated[
        str, Setting("K3_LOG_LEVEL", "Least level that is logged: DEBUG, INFO, WARNING, ERROR.")
    ] = "INFO"
    log_format: Annotated[
        str, Setting("K3_LOG_FORMAT", "`text` for people, `json` for collectors.")
    ] = "text"
    trace_dir: Annotated[
        str,
        Setting(
            "K3_TRACE_DIR", "Folder for spans as JSON lines, one file a process; empty is off."
        ),
    ] = ""
    trace_ratio: Annotated[
        float, Setting("K3_TRACE_RATIO", "Share of requests that are traced, 0 to 1.")
    ] = 1.0


def fields_of(settings_type: type[msgspec.Struct]) -> dict[str, tuple[Setting, Any]]:
    """Lists a settings class: field name -> (setting, type)."""
    found: dict[str, tuple[Setting, Any]] = {}
    for name, hint in get_type_hints(settings_type, include_extras=True).items():
        assert get_origin(hint) is Annotated, f"{settings_type.__name__}.{name} has no Setting"
        kind, *notes = get_args(hint)
        found[name] = (next(note for note in notes if isinstance(note, Setting)), kind)
    return found


def load_settings(
    settings_type: type[S], environment: Mapping[str, str], known_elsewhere: Iterable[str] = ()
) -> S:
    """Reads a settings class from the environment.

    Args:
        settings_type: what to fill.
        environment: usually `os.environ`.
        known_elsewhere: `K3_` names, or prefixes ending in `_`, of other services, which may stand
            in the same environment without being mistakes here.

    Raises:
        SettingsError: unknown or malformed variables, all named.
    """
    fields = fields_of(settings_type)
    known = {setting.name for setting, _ in fields.values()}
    # A service's own prefix is not foreign to it: a misspelt name under it must stop the start.
    foreign = (p for p in FOREIGN_PREFIXES if not any(name.startswith(p) for name in known))
    elsewhere = (*known_elsewhere, *foreign)
    faults = [
        f"{name} is not a setting of this service"
        for name in sorted(environment)
        if name.startswith(PREFIX) and name not in known and not _is_elsewhere(name, elsewhere)
    ]
    values: dict[str, Any] = {}
    for field, (setting, kind) in fields.items():
        text = environment.get(setting.name)
        if text is None:
            continue
        try:
            values[field] = _parse(text, kind)
        except (ValueError, msgspec.ValidationError):
            faults.append(f"{setting.name} must be {_kind_name(kind)}, not {text[:40]!r}")
    missing = [
        setting.name
        for field, (setting, _) in fields.items()
        if field not in values and field in _required(settings_type)
    ]
    faults += [f"{name} must be set" for name in missing]
    if faults:
        raise SettingsError("; ".join(faults))
    return settings_type(**values)


FOREIGN_PREFIXES = (
    "K3_GATEWAY_",
    "K3_FETCHER_",
    "K3_PREPROCESSOR_",
    "K3_ENCODER_",
    "K3_PREFILL_",
    "K3_DECODE_",
    "K3_UP_",
    "K3_KERNEL",
    "K3_SHARED_DIR",
    "K3_RELEASED_TOKENIZER",
    "K3_LIBRARY_PATH",
)
"""Variables that belong to one service, the command line or the tests; others leave them alone."""

SHARED_NAMES = (
    "K3_REDIS_URL",
    "K3_MOONCAKE_MASTER",
    "K3_CHECKPOINT",
    "K3_ENGINE",
    "K3_SCRIPT",
)
"""Variables that several services read and one environment sets for all."""


def _is_elsewhere(name: str, elsewhere: Iterable[str]) -> bool:
    return name in SHARED_NAMES or any(name.startswith(prefix) for prefix in elsewhere)


def _required(settings_type: type[msgspec.Struct]) -> set[str]:
    return {field.name for field in msgspec.structs.fields(settings_type) if field.required}


def _parse(text: str, kind: Any) -> Any:
    if kind is bool:
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in words:
            raise ValueError(text)
        return words[text.lower()]
    if get_origin(kind) is tuple:
        parts = (part.strip() for part in text.split(","))
        return tuple(_parse(part, get_args(kind)[0]) for part in parts if part)
    return msgspec.convert(text, kind, strict=False)


def _kind_name(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a list, separated by commas, of {_kind_name(get_args(kind)[0])}"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names.get(kind, f"one of {', '.join(map(str, get_args(kind)))}")


def settings_or_exit(settings_type: type[S], environment: Mapping[str, str]) -> S:
    """Reads settings, or prints what is wrong in one line and ends the process with status 2."""
    try:
        return load_settings(settings_type, environment)
    except SettingsError as error:
        _refuse(str(error))


def _refuse(text: str) -> NoReturn:
    sys.stderr.write(f"k3: wrong settings: {text}\n")
    raise SystemExit(2)
