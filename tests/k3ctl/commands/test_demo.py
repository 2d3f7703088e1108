"""`k3 demo`: its picture, and what an interruption leaves."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

from PIL import Image

from k3ctl.commands.demo import PICTURE
from k3ctl.demo_picture import draw_picture
from k3wire.lifeline import die_with_parent


def test_the_picture_that_a_clone_keeps_is_the_one_that_is_drawn() -> None:
    clone = Path(__file__).resolve().parents[3]
    with Image.open(clone / PICTURE) as kept, Image.open(io.BytesIO(draw_picture())) as drawn:
        assert kept.size == drawn.size
        assert kept.convert("RGB").tobytes() == drawn.convert("RGB").tobytes()


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
