"""A draft's directory: `config.json` and `model.safetensors`, under the released names.

Tensors that a file carries though the draft takes them from the target (DSpark's embedding) are
left out on load; anything else missing, left over or misshapen is an error that names it.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from k3core.config import ConfigError
from k3core.drafts.config import (
    CONFIG_NAME,
    DraftConfig,
    DSparkConfig,
    EagleConfig,
    format_draft_config,
    load_draft_config,
)
from k3core.drafts.dspark import DSparkDraft, TargetTables
from k3core.drafts.eagle import EagleDraft
from k3core.weights.errors import MisshapenTensorError
from k3core.weights.files import SINGLE_NAME, open_checkpoint
from k3core.weights.loading import raise_missing, raise_unexpected

SHARED_WITH_TARGET = frozenset({"embed_tokens.weight", "lm_head.weight"})


def save_draft(directory: Path, config: DraftConfig, draft: nn.Module, dtype: torch.dtype) -> None:
    """Write a draft into an existing directory, over what is there.

    Args:
        directory: to write to.
        config: of the draft.
        draft: whose parameters carry their released names.
        dtype: to store it in.
    """
    tensors = {
        name: parameter.detach().to("cpu", dtype).contiguous()
        for name, parameter in draft.named_parameters()
    }
    path = directory / SINGLE_NAME
    save_file(tensors, path, metadata={"format": "pt"})
    # The library makes files that only their owner can read; a draft is no secret.
    path.chmod(0o644)
    (directory / CONFIG_NAME).write_bytes(format_draft_config(config))


def load_eagle(directory: Path, device: torch.device, dtype: torch.dtype) -> EagleDraft:
    """Read an EAGLE-3.1 head.

    Raises:
        ConfigError: the directory holds no such head, or one that this code cannot run.
        CheckpointError: its tensors are absent, damaged, or not those of its config.
    """
    match load_draft_config(directory):
        case EagleConfig() as config:
            draft = EagleDraft(config).to(device, dtype)
        case DSparkConfig():
            raise ConfigError(f"{directory}: a DSpark draft where an EAGLE head was wanted")
    _fill(directory, draft, frozenset())
    return draft.eval()


def load_dspark(directory: Path, tables: TargetTables) -> DSparkDraft:
    """Read a DSpark draft, in dtype and on the device of the target's tables.

    Raises:
        ConfigError: the directory holds no such draft, or one that this code cannot run.
        CheckpointError: its tensors are absent, damaged, or not those of its config.
    """
    match load_draft_config(directory):
        case DSparkConfig() as config:
            draft = DSparkDraft(config, tables).to(tables.embed.device, tables.embed.dtype)
        case EagleConfig():
            raise ConfigError(f"{directory}: an EAGLE head where a DSpark draft was wanted")
    _fill(directory, draft, SHARED_WITH_TARGET)
    return draft.eval()


@torch.no_grad()
def _fill(directory: Path, draft: nn.Module, ignored: frozenset[str]) -> None:
    files = open_checkpoint(directory)
    parameters = dict(draft.named_parameters())
    raise_missing(parameters.keys() - files.file_of.keys())
    raise_unexpected(files.file_of.keys() - parameters.keys() - ignored)
    for name, tensor in files.read(parameters):
        parameter = parameters[name]
        if tensor.shape != parameter.shape or not tensor.is_floating_point():
            raise MisshapenTensorError(
                f"{name}: {tensor.dtype} {list(tensor.shape)}, expected {list(parameter.shape)}"
            )
        parameter.copy_(tensor)
