"""A gateway that let go of large bodies is as small as before."""

import subprocess
import sys

SCRIPT = """
from pathlib import Path
from k3_gateway.heap import give_back_large_blocks

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

give_back_large_blocks()
# By itself the C library would learn from this that blocks of such a size are usual.
b"x" * 24_000_000
before = resident_bytes()
bodies, others = [], []
for _ in range(8):
    bodies.append(b"x" * 4_000_000)
    others.append(b"y" * 2_000)
most = resident_bytes()
bodies.clear()
print(before, most, resident_bytes())
"""


def test_what_large_bodies_took_goes_back_though_others_stay() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    before, most, after = map(int, done.stdout.split())
    assert most - before > 30_000_000
    assert after - before < 2_000_000
