"""The shape of the repository: sizes, rooms, and what every service must have."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("gateway", "fetcher", "preprocessor", "encoder", "prefill", "decode")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
BANNED_NAMES = {"utils", "util", "common", "helpers", "misc"}


def tracked(pattern: str) -> list[Path]:
    """Files of the checkout that git tracks or would track, by pattern."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in listing.splitlines() if (ROOT / line).is_file()]


def test_no_file_is_longer_than_one_sitting() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in [*tracked("*.py"), *tracked("*.c"), *tracked("*.h")]
        if (lines := path.read_text().count("\n")) > MAX_FILE_LINES
    }
    assert not long


def test_no_function_is_longer_than_a_page() -> None:
    long: list[str] = []
    for path in tracked("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} {lines}")
    assert not long


def test_package_roots_are_empty() -> None:
    full = [
        str(path.relative_to(ROOT))
        for path in tracked("*/__init__.py")
        if "src" in path.parts and path.read_text().strip()
    ]
    assert not full


def test_no_room_is_a_junk_drawer() -> None:
    named = [str(p.relative_to(ROOT)) for p in tracked("*.py") if p.stem in BANNED_NAMES]
    assert not named


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_has_its_files(service: str) -> None:
    folder = ROOT / "services" / service
    source = folder / "src" / f"k3_{service}"
    wanted = [folder / "Dockerfile", folder / "pyproject.toml"]
    wanted += [source / name for name in ("__main__.py", "main.py", "settings.py")]
    assert [str(path) for path in wanted if not path.is_file()] == []


def test_ignored_lint_rules_say_why() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    head = text[: text.index("[tool.ruff]")]
    for rule in ("E501", "D104", "D105", "D107", "N812", "N818"):
        assert rule in head
