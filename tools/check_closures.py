"""Installs each service alone, as its Dockerfile does, and checks what came along.

`pip install ./services/X` must bring X's closure and nothing more: in particular the gateway, the
fetcher and the preprocessor come without torch. Each service gets a fresh virtual environment in a
temporary folder, then its main module is imported there.
"""

import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVICES = ("gateway", "fetcher", "preprocessor", "encoder", "prefill", "decode")
TORCH_FREE = {"gateway", "fetcher", "preprocessor"}
LISTING = """
import importlib.metadata as m
print("\\n".join(sorted(d.metadata["Name"].lower().replace("_", "-") for d in m.distributions())))
"""


def local_closure(project: Path) -> set[str]:
    """Names the distributions of this repository that a project depends on, by its own words."""
    found: set[str] = set()
    table = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    lines = list(table["dependencies"])
    for extra in table.get("optional-dependencies", {}).values():
        lines += extra
    for line in lines:
        name = line.split("@")[0].split("[")[0].strip()
        if (ROOT / "libs" / name).is_dir() and name not in found and project.name != name:
            found |= {name} | local_closure(ROOT / "libs" / name)
    return found


def check(service: str, folder: Path) -> list[str]:
    """Installs one service; gives what is wrong, one line each."""
    python = folder / service / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder / service)], check=True)
    project = ROOT / "services" / service
    target = f"{project}[cpu]" if service not in TORCH_FREE else str(project)
    lock = str(ROOT / "requirements/cpu.txt")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", lock]
    subprocess.run([*pip, target], check=True)
    listing = subprocess.run(
        [str(python), "-c", LISTING], check=True, capture_output=True, text=True
    ).stdout.split()
    faults: list[str] = []
    if service in TORCH_FREE and "torch" in listing:
        faults.append(f"{service}: torch came along")
    ours = {name for name in listing if name.startswith("k3")}
    expected = {f"k3-{service}"} | local_closure(project)
    if ours != expected:
        faults.append(f"{service}: expected {sorted(expected)}, found {sorted(ours)}")
    module = f"k3_{service}.main"
    done = subprocess.run(
        [str(python), "-c", f"import {module}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        faults.append(f"{service}: import of {module} fails: {done.stderr.strip()[-400:]}")
    return faults


def main() -> int:
    """Checks all services, or those named on the command line; 1 if any fails."""
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for service in sys.argv[1:] or SERVICES:
            start = time.monotonic()
            found = check(service, Path(folder))
            faults += found
            word = "FAIL" if found else "ok"
            sys.stdout.write(f"{service:14}{word}  {time.monotonic() - start:.0f} s\n")
            sys.stdout.flush()
    sys.stdout.write("".join(f"{fault}\n" for fault in faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
