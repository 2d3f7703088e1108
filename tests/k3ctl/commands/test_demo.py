"""`k3 demo`, interrupted."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from k3wire.lifeline import die_with_parent


def test_a_signal_that_ends_the_demonstration_leaves_no_folder(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("K3_")}
    with subprocess.Popen(
        [sys.executable, "-m", "k3ctl.main", "demo"],
        env=environment | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True,
        preexec_fn=die_with_parent(os.getpid()),
    ) as demo:  # fmt: skip
        assert demo.stdout is not None
        assert "starting NATS" in demo.stdout.readline()
        assert list(tmp_path.glob("k3-demo-*"))
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(40) == 130
    assert not list(tmp_path.glob("k3-demo-*"))
