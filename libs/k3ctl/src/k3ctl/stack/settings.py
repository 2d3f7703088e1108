"""What `k3 up` reads from its environment, apart from the services' own settings."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from k3wire.service.settings import Setting, SettingsError, fields_of

PREFIX = "K3_UP_"


class UpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that only the supervisor reads."""

    folder: Annotated[
        str, Setting("K3_UP_FOLDER", "Folder of the running stack: state, logs, traces.")
    ] = ".k3/run"
    nats_port: Annotated[int, Setting("K3_UP_NATS_PORT", "Port of NATS; 0 takes a free one.")] = 0
    redis_port: Annotated[
        int, Setting("K3_UP_REDIS_PORT", "Port of Redis; 0 takes a free one.")
    ] = 0
    mooncake_port: Annotated[
        int, Setting("K3_UP_MOONCAKE_PORT", "Port of Mooncake's master; 0 takes a free one.")
    ] = 0
    redis_bytes: Annotated[
        int, Setting("K3_UP_REDIS_BYTES", "Memory of Redis, tier L1.", "bytes")
    ] = 256 * 1024 * 1024
    segment_bytes: Annotated[
        int,
        Setting("K3_UP_SEGMENT_BYTES", "Memory of the shared store, tiers L2 and L3.", "bytes"),
    ] = 512 * 1024 * 1024


def read_up_settings(environment: Mapping[str, str]) -> UpSettings:
    """Reads the supervisor's own variables.

    Raises:
        SettingsError: unknown or malformed ones, all named.
    """
    fields = {
        setting.name: (field, kind) for field, (setting, kind) in fields_of(UpSettings).items()
    }
    faults: list[str] = []
    values: dict[str, object] = {}
    for name in sorted(environment):
        if not name.startswith(PREFIX):
            continue
        if name not in fields:
            faults.append(f"{name} is not a setting of `k3 up`")
            continue
        field, kind = fields[name]
        text = environment[name]
        if kind is str:
            values[field] = text
        elif text.isascii() and text.isdigit():
            values[field] = int(text)
        else:
            faults.append(f"{name} must be a whole number, not {text[:40]!r}")
    faults += [
        f"{name} must be a port, 0 to 65535"
        for name, (field, _) in fields.items()
        if field.endswith("_port") and not 0 <= int(str(values.get(field, 0))) < 65536
    ]
    if faults:
        raise SettingsError("; ".join(faults))
    return msgspec.convert(values, UpSettings)
