"""The process in which images are decoded: one at a time, with nothing else within reach.

Started by the sandbox as `python -m k3text.images.sandbox_worker PARENT_PID`. After its set-up it
can open no file and no socket (its limit of open files is zero), start no process, write no file
and dump no core; memory and processor time are bounded. It ends when its standard input does, and
at once, in the middle of an image too, when its service does.
"""

import contextlib
import mmap
import os
import resource
import signal
import sys
from typing import BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import AvifImagePlugin, Image, ImageFile, MpoImagePlugin

from k3text.images.native.steps import native_steps
from k3text.images.processor import cut
from k3text.images.sandbox_protocol import LENGTH, Done, Job, Ready, Reply, Setup, frame
from k3wire.errors import ImageTooLarge, K3Error
from k3wire.lifeline import die_with_parent


def main() -> None:
    """Serves jobs until the input ends."""
    die_with_parent(int(sys.argv[1]))()
    # A Ctrl-C at the terminal is for the service, which then closes this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Replies go to a descriptor of their own: nothing a library prints can pass for one.
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    setup = msgspec.msgpack.decode(_read(sys.stdin.buffer), type=Setup)
    source = mmap.mmap(setup.input_fd, setup.input_bytes, prot=mmap.PROT_READ)
    target = np.frombuffer(mmap.mmap(setup.output_fd, setup.output_bytes), dtype=np.uint8)
    _prepare_pillow(setup)
    # No library could be opened after the lock.
    native_steps()
    _lock_in(setup)
    replies.write(frame(Ready()))
    while data := _read(sys.stdin.buffer):
        job = msgspec.msgpack.decode(data, type=Job)
        _allow_cpu(setup.cpu_s)
        replies.write(frame(_run(setup, source[: job.num_bytes], target)))


def _read(stream: BinaryIO) -> bytes:
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""


def _run(setup: Setup, data: bytes, target: npt.NDArray[np.uint8]) -> Reply:
    try:
        patched = cut(data, setup.config, setup.limits, target)
    except K3Error as error:
        return error.to_info()
    except MemoryError:
        return ImageTooLarge("The image is too large to decode").to_info()
    return Done(
        grid_thw=patched.grid_thw,
        width=patched.width,
        height=patched.height,
        num_tokens=patched.num_tokens,
    )


def _prepare_pillow(setup: Setup) -> None:
    """Loads now what could not be opened later, and bounds what Pillow bounds itself."""
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    # Our own limit has judged the header; this one also covers what a header does not show.
    Image.MAX_IMAGE_PIXELS = setup.limits.max_pixels
    # A decoder's threads could not be started after the lock.
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    # Pillow would import this while it opens a JPEG, which no open file allows here later.
    assert MpoImagePlugin.MpoImageFile.format
    Image.preinit()


def _lock_in(setup: Setup) -> None:
    used = _address_space_bytes()
    limits = {
        resource.RLIMIT_AS: used + setup.memory_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 0,
    }
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # A container may hold a limit lower still, which is as good.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (bound, bound))


def _allow_cpu(cpu_s: int) -> None:
    """Moves the bound of processor time to so many seconds from now."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(
        resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 1 + cpu_s, hard)
    )


def _address_space_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * mmap.PAGESIZE


if __name__ == "__main__":
    main()
