"""Every setting is on the settings page, and the page says nothing else."""

import importlib.util
import re
from pathlib import Path

from k3wire.service.settings import fields_of

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("settings_page", ROOT / "tools/settings_page.py")
assert spec is not None
assert spec.loader is not None
settings_page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(settings_page)


def test_the_page_is_what_the_declarations_say() -> None:
    assert settings_page.PAGE.read_text() == settings_page.page(), "run tools/settings_page.py"


def test_every_setting_has_a_name_of_its_own_service_and_a_sentence() -> None:
    for service in settings_page.SERVICES:
        for setting, _ in fields_of(settings_page.settings_class(service)).values():
            assert re.fullmatch(r"K3_[A-Z0-9_]+", setting.name)
            assert setting.meaning.rstrip("`").endswith(".")
            own = f"K3_{service.upper()}_"
            others = [
                f"K3_{other.upper()}_" for other in settings_page.SERVICES if other != service
            ]
            assert not any(setting.name.startswith(prefix) for prefix in others), own


def test_one_name_means_the_same_everywhere() -> None:
    seen: dict[str, type] = {}
    for service in settings_page.SERVICES:
        for setting, kind in fields_of(settings_page.settings_class(service)).values():
            assert seen.setdefault(setting.name, kind) == kind, setting.name
