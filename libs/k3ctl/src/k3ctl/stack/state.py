"""What a running stack writes down for the other commands: one JSON file in its folder."""

import os
from pathlib import Path

import msgspec

from k3ctl.stack.settings import read_up_settings

STATE_FILE = "state.json"


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """One child: its name, role, process id, phase, restarts and log."""

    name: str
    role: str
    pid: int
    phase: str
    num_restarts: int
    exit_code: int | None
    log: str


class StackState(msgspec.Struct, frozen=True, kw_only=True):
    """One stack.

    Attributes:
        supervisor_pid: who runs it.
        supervisor_start_ticks: when that process began; its number alone may be another's later.
        folder: logs, traces, this file.
        is_ready: whether every worker was ready at least once.
        started_unix_s: when.
        ready_after_s: from start to ready, 0 before.
        gateway_url: of the API.
        nats_url: control plane.
        redis_url: tier L1.
        mooncake_master: data plane's shared store.
        checkpoint: what is served.
        model: name to ask for.
        engine: `model` or `scripted`.
        processes: all children.
    """

    supervisor_pid: int
    supervisor_start_ticks: int
    folder: str
    is_ready: bool
    started_unix_s: float
    ready_after_s: float
    gateway_url: str
    nats_url: str
    redis_url: str
    mooncake_master: str
    checkpoint: str
    model: str
    engine: str
    processes: tuple[ProcessState, ...]


def run_folder() -> Path:
    """The folder of the stack: `K3_UP_FOLDER`, or `.k3/run` here.

    Raises:
        SettingsError: a `K3_UP_` variable is unknown or malformed.
    """
    return Path(read_up_settings(os.environ).folder)


def write_state(folder: Path, state: StackState) -> None:
    """Replaces the file whole, so that no reader sees half of it."""
    draft = folder / f"{STATE_FILE}.new"
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(state)))
    draft.replace(folder / STATE_FILE)


def read_state(folder: Path) -> StackState | None:
    """Reads the state of a stack that is running; None where none is."""
    try:
        state = msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=StackState)
    except (OSError, msgspec.DecodeError):
        return None
    is_same = start_ticks(state.supervisor_pid) == state.supervisor_start_ticks
    return state if is_same and is_running(state.supervisor_pid) else None


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    return _stat(pid)[0] not in ("", "Z", "X")


def start_ticks(pid: int) -> int:
    """When a process began, in clock ticks after the system did; 0 if there is none."""
    return int(_stat(pid)[1])


def _stat(pid: int) -> tuple[str, str]:
    """State and start time of a process; ("", "0") if there is none.

    Source: proc_pid_stat(5), fields 3 and 22; the name before them may hold anything.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", "0"
    return fields[0], fields[19]


def family(pid: int) -> set[int]:
    """A process and all below it, as far as they live."""
    found = {pid} if is_running(pid) else set[int]()
    frontier = list(found)
    while frontier:
        # Every thread lists the children that it made itself.
        for path in Path(f"/proc/{frontier.pop()}/task").glob("*/children"):
            try:
                children = {int(child) for child in path.read_text().split()} - found
            except OSError:
                continue
            found |= children
            frontier += children
    return found


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and all below it, 0 if it is gone.

    A page that several processes hold counts in parts, so that sums are true.
    """
    return sum(map(_own_resident_bytes, family(pid)))


def _own_resident_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(text.partition("\nPss:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        pass
    # Not everywhere may another's pages be looked at; what is shared then counts several times.
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
