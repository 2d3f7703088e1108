"""`k3 doctor`: what is installed, which backends are used and why, and what to change."""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from k3core.transfer.system_libraries import is_in_system, preload
from k3ctl.stack.infrastructure import find_program, find_redis
from k3ctl.stack.state import read_state, run_folder
from k3ctl.subparsers import Subparsers

NEEDED_BYTES = 3 * 10**9
PACKAGES = (
    "torch",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
    "tokenspeed-flashkda",
    "flashinfer-python",
    "triton",
    "numba",
    "nats-py",
    "redis",
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp-proto-http",
)
FIXED_PORTS = ("K3_GATEWAY_PORT", "K3_UP_NATS_PORT", "K3_UP_REDIS_PORT", "K3_UP_MOONCAKE_PORT")
MAX_PORT = 65535
NEEDED_PACKAGES = ("torch", "nats-py", "redis", "opentelemetry-sdk")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, and what to do if it is not well."""

    what: str
    verdict: Literal["ok", "absent", "fix"]
    found: str
    advice: str = ""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command."""
    parser = subparsers.add_parser("doctor", help="look at this machine and say what to change")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    parser.set_defaults(run=run)


def findings() -> Iterator[Finding]:
    """Looks at everything."""
    version = platform.python_version()
    is_new = sys.version_info >= (3, 11)
    yield Finding(
        "python", "ok" if is_new else "fix", version, "" if is_new else "use 3.11 or newer"
    )
    yield from _packages()
    yield from _programs()
    yield from _kernels()
    yield _memory()
    state = read_state(run_folder())
    if state is None:
        yield from _ports(os.environ)
    yield Finding("stack", "ok" if state else "absent", state.gateway_url if state else "none runs")


def _packages() -> Iterator[Finding]:
    for name in PACKAGES:
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            is_needed = name in NEEDED_PACKAGES
            advice = "run `make setup`" if is_needed else ""
            yield Finding(name, "fix" if is_needed else "absent", "not installed", advice)


def _programs() -> Iterator[Finding]:
    for name in ("nats-server", "mooncake_master", "mooncake_client"):
        found = find_program(name)
        yield Finding(
            name,
            "ok" if found else "fix",
            found or "not found",
            "" if found else "run `make setup`",
        )
    redis = find_redis()
    yield Finding(
        "redis", "ok" if redis else "fix", redis or "not found", "" if redis else "run `make setup`"
    )
    where = "the system's" if is_in_system() else "unpacked by the set-up"
    if preload():
        yield Finding("libibverbs", "ok", where)
    else:
        yield Finding("libibverbs", "fix", "not found", "run `make setup` or install libibverbs1")


def _kernels() -> Iterator[Finding]:
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), "")
    yield Finding(
        "compiler",
        "ok" if compiler else "absent",
        compiler or "none: kernels fall back to numba or torch, several times slower",
        "" if compiler else "install gcc for faster kernels",
    )
    if importlib.util.find_spec("torch") is None:
        return
    # Imported here because it takes seconds and the other findings must come without it.
    import torch

    has_gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if has_gpu else "no CUDA device: everything runs on the CPU"
    yield Finding("device", "ok" if has_gpu else "absent", name)
    yield from _backends("cuda" if has_gpu else "cpu")


def _backends(device_type: str) -> Iterator[Finding]:
    from k3core.kernels.errors import BackendUnavailableError
    from k3core.kernels.registry import BACKENDS, reference_kernels

    base = reference_kernels()
    for backend in BACKENDS:
        if backend.device_type != device_type:
            continue
        try:
            kernels = backend.build(base)
        except BackendUnavailableError as error:
            yield Finding(f"kernels {backend.name}", "absent", f"cannot be used: {error}")
            continue
        yield Finding("kernels", "ok", f"{kernels.name} is used: {kernels.reason}")
        return
    advice = "install gcc for kernels several times faster" if device_type == "cpu" else ""
    yield Finding("kernels", "ok", "reference is used: nothing faster can be built here", advice)


def _ports(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Looks whether the ports that are fixed by setting are free."""
    for name in FIXED_PORTS:
        text = environment.get(name, "0")
        if not text.isdigit() or int(text) > MAX_PORT:
            yield Finding(name, "fix", text, "set it to a port, 0 to 65535")
        elif int(text):
            is_free = _is_free(int(text))
            found = f"port {text} is {'free' if is_free else 'taken'}"
            advice = "" if is_free else f"stop what listens there, or set {name}=0"
            yield Finding(name, "ok" if is_free else "fix", found, advice)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _memory() -> Finding:
    table = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    free = int(table["MemAvailable"].split()[0]) * 1024
    is_enough = free > NEEDED_BYTES
    return Finding(
        "memory",
        "ok" if is_enough else "fix",
        f"{free / 1e9:.1f} GB available, {os.cpu_count()} cores",
        "" if is_enough else "the demo stack needs about 1.5 GB",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command; 1 if something must be fixed."""
    found = list(findings())
    if args.json:
        print(msgspec.json.encode([msgspec.to_builtins(one) for one in found]).decode())
    else:
        marks = {"ok": "ok  ", "absent": "-   ", "fix": "FIX "}
        for one in found:
            advice = f"  -> {one.advice}" if one.advice else ""
            print(f"{marks[one.verdict]}{one.what:40}{one.found}{advice}")
    return 1 if any(one.verdict == "fix" for one in found) else 0
