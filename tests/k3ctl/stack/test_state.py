"""What a stack writes down is believed only while the very process that wrote it runs."""

import os
from pathlib import Path

import msgspec

from k3ctl.stack.state import StackState, is_running, read_state, start_ticks, write_state


def state(folder: Path) -> StackState:
    return StackState(
        supervisor_pid=os.getpid(),
        supervisor_start_ticks=start_ticks(os.getpid()),
        folder=str(folder),
        is_ready=True,
        started_unix_s=1.0,
        ready_after_s=1.0,
        gateway_url="http://127.0.0.1:1",
        nats_url="",
        redis_url="",
        mooncake_master="",
        checkpoint="",
        model="m",
        engine="model",
        processes=(),
    )


def test_a_state_is_believed_while_its_supervisor_runs_and_not_for_another_of_its_number(
    tmp_path: Path,
) -> None:
    mine = state(tmp_path)
    write_state(tmp_path, mine)
    assert read_state(tmp_path) == mine
    reused = msgspec.structs.replace(mine, supervisor_start_ticks=mine.supervisor_start_ticks - 1)
    write_state(tmp_path, reused)
    assert read_state(tmp_path) is None


def test_a_process_that_is_not_there_neither_runs_nor_began() -> None:
    nobody = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    assert not is_running(nobody)
    assert start_ticks(nobody) == 0
    assert 0 < start_ticks(1) <= start_ticks(os.getpid())
