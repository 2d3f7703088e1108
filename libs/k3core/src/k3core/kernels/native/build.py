"""Compiling the native kernels on first use, once per machine and source.

The C sources lie beside this file. They are compiled with the system's compiler for the
machine's own processor, and the shared object is kept in a per-user folder under a name made
of the sources, the flags, the compiler and the processor, so a change of any makes a new one.
Compiling goes to a folder of its own and ends in one rename: processes that start at the same
time each see a whole file or none.

Compile and link are two steps, and no step has -ffast-math: linking with it would set
flush-to-zero for every thread of the process (KDA kernel notes, section 3d).
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from k3core.kernels.errors import BackendUnavailableError

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "src"
COMPILERS = ("cc", "gcc", "clang")
# Contraction is off because the sources fuse by hand where they want it, see k3.h.
BASE_FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fvisibility=hidden",
)
# Tried in order until one compiles; every one gives a right library, later ones a slower.
OPTIONAL_FLAGS: tuple[tuple[str, ...], ...] = (("-march=native",), ())
# Seconds of work; on a machine whose processors are taken it has been seen to last two minutes.
COMPILE_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A compiler and what it calls itself.

    Attributes:
        compiler: absolute path.
        version: first line of its `--version`.
    """

    compiler: str
    version: str


def find_toolchain(compilers: Sequence[str] = COMPILERS) -> Toolchain:
    """The first compiler on the path.

    Raises:
        BackendUnavailableError: there is none.
    """
    for name in compilers:
        path = shutil.which(name)
        if path is None:
            continue
        shown = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
        if shown.returncode == 0:
            return Toolchain(path, shown.stdout.splitlines()[0] if shown.stdout else name)
    raise BackendUnavailableError(f"no C compiler on the path (looked for {', '.join(compilers)})")


def cache_dirs() -> tuple[Path, ...]:
    """Folders for libraries, the preferred one first.

    K3_KERNEL_CACHE alone if it is set; else a folder of ours under XDG_CACHE_HOME or ~/.cache,
    then one under the system's temporary folder for accounts that have no home.
    """
    chosen = os.environ.get("K3_KERNEL_CACHE")
    if chosen:
        return (Path(chosen),)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    temporary = Path(tempfile.gettempdir()) / f"k3core-kernels-{os.getuid()}"
    return (Path(base) / "k3core" / "kernels", temporary)


def usable_cache_dir(candidates: Sequence[Path]) -> Path:
    """The first folder that can be written by us and by nobody else; made if missing.

    Raises:
        BackendUnavailableError: none is; the message has what is wrong with each.
    """
    faults: list[str] = []
    for folder in candidates:
        fault = _fault_of_folder(folder)
        if fault is None:
            return folder
        faults.append(f"{folder}: {fault}")
    raise BackendUnavailableError(f"no folder for compiled kernels ({'; '.join(faults)})")


def build_library(
    cache_dir: Path,
    toolchain: Toolchain,
    optional_flags: Sequence[tuple[str, ...]] = OPTIONAL_FLAGS,
    source_dir: Path = SOURCE_DIR,
) -> Path:
    """Compile, unless that was done before; blocks for a few seconds if not.

    Args:
        cache_dir: where libraries are kept; created with mode 0700.
        toolchain: what to compile with.
        optional_flags: sets of flags to try in turn, beside those that are always given.
        source_dir: the C sources and headers, all of which go into the library.

    Returns:
        Path of the shared object.

    Raises:
        BackendUnavailableError: the compiler fails with every set of flags, or the folder cannot
            be written or belongs to somebody else.
    """
    cache_dir = usable_cache_dir([cache_dir])
    errors: list[str] = []
    for optional in optional_flags:
        flags = (*BASE_FLAGS, *optional)
        library = cache_dir / f"k3-{_fingerprint(source_dir, flags, toolchain)}.so"
        if library.is_file():
            return library
        failure = _compile(sorted(source_dir.glob("*.c")), library, flags, toolchain)
        if failure is None:
            logger.info(
                "native kernels compiled",
                extra={"library": str(library), "flags": " ".join(optional)},
            )
            return library
        errors.append(failure)
    raise BackendUnavailableError(f"{toolchain.compiler} cannot compile the kernels: {errors[-1]}")


def _fault_of_folder(folder: Path) -> str | None:
    """A library found here is run: nobody else may be able to have put it there."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        owner = folder.stat()
    except OSError as error:
        return error.strerror or str(error)
    if owner.st_uid != os.getuid() or owner.st_mode & 0o022:
        return "can be written by other users"
    return None if os.access(folder, os.W_OK) else "cannot be written"


def _fingerprint(source_dir: Path, flags: Sequence[str], toolchain: Toolchain) -> str:
    digest = hashlib.sha256()
    for source in sorted(source_dir.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update("\0".join((*flags, toolchain.compiler, toolchain.version)).encode())
    digest.update(_processor().encode())
    return digest.hexdigest()[:20]


def _processor() -> str:
    """What -march=native depends on: a shared home folder may serve unlike machines."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.platform()
    wanted = ("flags", "Features", "model name", "CPU part")
    first = text.split("\n\n", 1)[0].splitlines()
    kept = (line for line in first if line.split(":", 1)[0].strip() in wanted)
    return "\n".join((platform.machine(), *kept))


def _compile(
    sources: Sequence[Path], library: Path, flags: Sequence[str], toolchain: Toolchain
) -> str | None:
    """Compile every source side by side, link, rename; the compiler's words if it fails."""
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        commands = [
            [toolchain.compiler, *flags, "-c", str(source), "-o", str(obj)]
            for source, obj in zip(sources, objects, strict=True)
        ]
        failure = _run_together(commands)
        if failure is not None:
            return failure
        linked = Path(folder) / "linked.so"
        link = [toolchain.compiler, "-shared", "-pthread", "-o", str(linked), *map(str, objects)]
        failure = _run_together([[*link, "-lm"]])
        if failure is None:
            os.replace(linked, library)
        return failure


def _run_together(commands: Sequence[Sequence[str]]) -> str | None:
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    failure = None
    try:
        for process in running:
            _, complaint = process.communicate(timeout=COMPILE_TIMEOUT_S)
            if process.returncode != 0:
                failure = complaint.strip()[-2000:] or f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        failure = f"no end after {COMPILE_TIMEOUT_S} s"
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    return failure
