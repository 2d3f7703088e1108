"""Writes docs/settings.md from the services' settings classes: `python tools/settings_page.py`."""

import importlib
import sys
from pathlib import Path
from typing import Any

import msgspec

from k3ctl.stack.settings import UpSettings
from k3wire.service.settings import CommonSettings, fields_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "settings.md"
SERVICES = ("gateway", "fetcher", "preprocessor", "encoder", "prefill", "decode")
HEAD = """# Settings

One environment variable a setting, read once at the start. An unknown `K3_…` variable, or one that does not parse, stops the start;
all mistakes are named at once. Made by `tools/settings_page.py` from the services' own declarations; do not edit.
"""


def settings_class(service: str) -> type[CommonSettings]:
    """Finds the settings class of a service."""
    module = importlib.import_module(f"k3_{service}.settings")
    return next(
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, CommonSettings)
        and value is not CommonSettings
    )


def _cell(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "(none)"
    return str(value) if value != "" else "(empty)"


def _table(kind: type[msgspec.Struct], leave_out: set[str]) -> list[str]:
    default = kind()
    rows = ["| Variable | Default | Unit | Meaning |", "|---|---|---|---|"]
    for field, (setting, _) in fields_of(kind).items():
        if field not in leave_out:
            value = _cell(getattr(default, field))
            rows.append(f"| `{setting.name}` | `{value}` | {setting.unit} | {setting.meaning} |")
    return rows


def page() -> str:
    """Gives the whole page."""
    common = set(fields_of(CommonSettings))
    lines = [HEAD, "## Every service", "", *_table(CommonSettings, set())]
    for service in SERVICES:
        lines += ["", f"## {service}", "", *_table(settings_class(service), common)]
    lines += [
        "",
        "## The local stack (`k3 up`)",
        "",
        *_table(UpSettings, set()),
        "",
        "## Commands and set-up",
        "",
        "| Variable | Meaning |",
        "|---|---|",
        "| `K3_API_KEY` | Key that `k3 ask` sends. |",
        "| `K3_LIBRARY_PATH` | Folder of unpacked system libraries that Mooncake needs. |",
        "| `OTEL_EXPORTER_OTLP_ENDPOINT` | Where spans go by OTLP/HTTP, beside the JSON lines. |",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
