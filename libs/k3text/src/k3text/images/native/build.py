"""Compiling the native steps at first use, once per source and compiler.

The sources lie beside this file. They are compiled for any processor of the machine's kind, in about
half a second, and kept in a folder that only this account can write, under a name made of the
source, the flags and the compiler. Compiling ends in one rename: processes that start at the same
time each see a whole file or none.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = tuple(Path(__file__).parent / name for name in ("patches.c", "resize.c"))
HEADER = Path(__file__).parent / "wide.h"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-std=c11", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden")
COMPILE_TIMEOUT_S = 600.0
FORBIDDEN_MODE = 0o022
"""Write permission of the group and of everybody."""


class NativeUnavailableError(RuntimeError):
    """The native steps cannot be had here: no compiler, or no folder for what it makes."""


def folders() -> tuple[Path, ...]:
    """Folders for the compiled steps, the preferred one first.

    One under XDG_CACHE_HOME or ~/.cache, then one under the system's temporary folder for accounts
    that have no home.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    temporary = Path(tempfile.gettempdir()) / f"k3text-native-{os.getuid()}"
    return (Path(base) / "k3text" / "native", temporary)


def build(candidates: Sequence[Path], compilers: Sequence[str] = COMPILERS) -> Path:
    """Compiles, unless that was done before.

    Args:
        candidates: folders, of which the first that can be used is; made if missing, mode 0700.
        compilers: names to look for on the path.

    Returns:
        Path of the shared object.

    Raises:
        NativeUnavailableError: there is no compiler, it fails, or no folder can be used.
    """
    folder = _usable(candidates)
    compiler = next((found for name in compilers if (found := shutil.which(name))), None)
    if compiler is None:
        raise NativeUnavailableError(f"no C compiler on the path ({', '.join(compilers)})")
    try:
        library = folder / f"k3-images-{_fingerprint(compiler)}.so"
        if not library.is_file():
            _compile(compiler, library)
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailableError(f"{compiler} does not run: {error}") from error
    return library


def _usable(candidates: Sequence[Path]) -> Path:
    """Gives the first folder that is ours alone: a library found there is run."""
    faults: list[str] = []
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = folder.stat()
        except OSError as error:
            faults.append(f"{folder}: {error.strerror}")
            continue
        if found.st_uid != os.getuid() or found.st_mode & FORBIDDEN_MODE:
            faults.append(f"{folder}: can be written by other users")
        elif not os.access(folder, os.W_OK):
            faults.append(f"{folder}: cannot be written")
        else:
            return folder
    raise NativeUnavailableError(f"no folder for compiled code ({'; '.join(faults)})")


def _fingerprint(compiler: str) -> str:
    version = _run([compiler, "--version"]).partition("\n")[0]
    sources = (path.read_text(encoding="utf-8") for path in (*SOURCES, HEADER))
    parts = (*sources, *FLAGS, compiler, version, platform.machine())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _compile(compiler: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as scratch:
        made = Path(scratch) / library.name
        _run([compiler, *FLAGS, *map(str, SOURCES), "-o", str(made)])
        os.replace(made, library)


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise NativeUnavailableError(f"{command[0]} fails: {done.stderr.strip()[-500:]}")
    return done.stdout
