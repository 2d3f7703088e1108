"""Set-up step: gets the shared libraries that Mooncake needs, without root.

`python -m k3ctl.system_libraries` does nothing where the system has libibverbs. Elsewhere it
downloads the distribution's packages with apt-get and unpacks them into the virtual environment,
or says in one line what to install.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from k3core.transfer.system_libraries import LIBRARIES, preload, private_folder

PACKAGES = ("libnl-3-200", "libnl-route-3-200", "libibverbs1")
ADVICE = (
    "k3: Mooncake needs libibverbs.so.1; install it with your package manager "
    "(Debian, Ubuntu: apt-get install libibverbs1)\n"
)


def fetch(folder: Path) -> bool:
    """Downloads and unpacks the packages; says whether all libraries are there."""
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        return False
    with tempfile.TemporaryDirectory(prefix="k3-libraries-") as name:
        scratch = Path(name)
        if not (_download(scratch, ()) or _download(scratch, _own_lists(scratch))):
            return False
        for archive in scratch.glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(archive), str(scratch)], check=True)
        found = {library: next(scratch.rglob(library), None) for library in LIBRARIES}
        if None in found.values():
            return False
        folder.mkdir(parents=True, exist_ok=True)
        for library, path in found.items():
            if path is not None:
                shutil.copy(path.resolve(), folder / library)
    return True


def _download(scratch: Path, options: Sequence[str]) -> bool:
    """Downloads all packages into a folder; says whether it could."""
    command = ["apt-get", *options, "download", *PACKAGES]
    return subprocess.run(command, cwd=scratch, capture_output=True, check=False).returncode == 0


def _own_lists(scratch: Path) -> list[str]:
    """Fetches package lists of our own: a bare machine has none, and only root may renew them."""
    for part in ("lists/partial", "cache/archives/partial"):
        (scratch / part).mkdir(parents=True)
    options = [
        "-o", f"Dir::State::lists={scratch}/lists", "-o", f"Dir::Cache={scratch}/cache",
        "-o", "APT::Sandbox::User=", "-o", "Debug::NoLocking=1",
    ]  # fmt: skip
    subprocess.run(["apt-get", *options, "update"], capture_output=True, check=False)
    return options


def main() -> int:
    """Runs the step; 1 if the libraries cannot be had."""
    if preload():
        return 0
    if fetch(private_folder()) and preload():
        sys.stdout.write(f"unpacked libibverbs into {private_folder()}\n")
        return 0
    sys.stderr.write(ADVICE)
    return 1


if __name__ == "__main__":
    sys.exit(main())
