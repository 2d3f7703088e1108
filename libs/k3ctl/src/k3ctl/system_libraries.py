"""Set-up step: gets the shared libraries that Mooncake needs, without root.

`python -m k3ctl.system_libraries` does nothing where the system has libibverbs. Elsewhere it
downloads the distribution's packages with apt-get and unpacks them into the virtual environment,
or says in one line what to install.
"""

import shutil
import subprocess
import sys
import tempfile
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
    with tempfile.TemporaryDirectory() as scratch:
        for package in PACKAGES:
            done = subprocess.run(
                ["apt-get", "download", package], cwd=scratch, capture_output=True, check=False
            )
            if done.returncode:
                return False
        for archive in Path(scratch).glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(archive), scratch], check=True)
        folder.mkdir(parents=True, exist_ok=True)
        for name in LIBRARIES:
            found = next(Path(scratch).rglob(name), None)
            if found is None:
                return False
            shutil.copy(found.resolve(), folder / name)
    return True


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
