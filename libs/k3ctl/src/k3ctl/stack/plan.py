"""What a stack consists of: which processes, with which environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from k3ctl.checkpoints import SHIPPED_FOLDER
from k3ctl.stack.infrastructure import free_port, library_environment
from k3ctl.stack.settings import PREFIX, UpSettings
from k3wire.messages.base import Stage

SERVICES: tuple[Stage, ...] = (
    "gateway", "fetcher", "preprocessor", "encoder", "prefill", "decode",
)  # fmt: skip

START_ORDER: tuple[Stage, ...] = (
    "prefill", "decode", "encoder", "preprocessor", "gateway", "fetcher",
)  # fmt: skip
"""The slowest to start come first: they load the model's libraries and weights."""

TORCH_SERVICES: tuple[Stage, ...] = ("prefill", "decode", "encoder")
"""Load torch when they run the model."""

DEFAULT_GRACE_S = 30.0

SHORT_UNITS = {"K3_PREFILL_UNIT": "32", "K3_DECODE_UNIT": "32"}
"""For the demo checkpoint: questions about its small pictures are shorter than a usual unit."""

API_KEY = "K3_API_KEY"
"""Key that `k3 ask` sends."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the infrastructure listens."""

    nats_url: str = ""
    redis_url: str = ""
    mooncake_master: str = ""


@dataclass(frozen=True, slots=True)
class StackPlan:
    """What to run.

    Attributes:
        folder: for logs, traces and the state.
        checkpoint: directory of the model.
        settings: of the supervisor.
        environment: of the supervisor; children get it, with what the stack decides.
        engine: `model` or `scripted`.
        script: of the scripted engine, "" for none.
        num_workers: processes by role; a role that is missing runs once.
        only: roles to run; empty: all.
    """

    folder: Path
    checkpoint: Path
    settings: UpSettings
    environment: Mapping[str, str]
    engine: str = "model"
    script: str = ""
    num_workers: Mapping[str, int] = field(default_factory=dict[str, int])
    only: tuple[str, ...] = ()

    @property
    def model_name(self) -> str:
        """What clients ask for."""
        return self.environment.get("K3_GATEWAY_MODEL_NAME") or self.checkpoint.resolve().name

    @property
    def grace_s(self) -> float:
        """Time that a worker's running requests get at a stop; the workers' own setting."""
        try:
            return max(0.0, float(self.environment.get("K3_GRACE_S", DEFAULT_GRACE_S)))
        except ValueError:
            # The workers refuse to start with it, and say so by name.
            return DEFAULT_GRACE_S

    def workers(self) -> list[tuple[str, Stage]]:
        """Lists the workers to run, (name, role), in the order of their start."""
        return [
            (f"{role}-{index}", role)
            for role in START_ORDER
            if not self.only or role in self.only
            for index in range(self.num_workers.get(role, 1))
        ]

    def worker_environment(self, endpoints: Endpoints) -> dict[str, str]:
        """The environment of every worker; a gateway's free port is drawn once and kept."""
        own = {k: v for k, v in library_environment(self.environment).items() if not _is_ours(k)}
        if own.get("K3_GATEWAY_PORT", "0") == "0":
            # Drawn here, so that a gateway which is started again is found where it was.
            own["K3_GATEWAY_PORT"] = str(free_port())
        own.setdefault("OMP_NUM_THREADS", "1")
        # Torch's idle threads would spin on the cores that the kernels' own threads want.
        own.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if self.checkpoint.resolve() == SHIPPED_FOLDER:
            own = SHORT_UNITS | own
        own.setdefault("K3_TRACE_DIR", str((self.folder / "traces").resolve()))
        return own | {
            "K3_NATS_URL": endpoints.nats_url,
            "K3_REDIS_URL": endpoints.redis_url,
            "K3_MOONCAKE_MASTER": endpoints.mooncake_master,
            "K3_CHECKPOINT": str(self.checkpoint.resolve()),
            "K3_ENGINE": self.engine,
            "K3_SCRIPT": self.script,
            "PYTHONUNBUFFERED": "1",
        }


def _is_ours(name: str) -> bool:
    """Whether a variable is for the command line, and an unknown one to the workers."""
    return name.startswith(PREFIX) or name == API_KEY
