"""`k3 make-checkpoint`: a random K3 checkpoint in the released layout, to run without downloads."""

import argparse
import json
import sys
from pathlib import Path

from k3core.config import ModelConfig
from k3core.weights.random_checkpoint import SIZES, random_config, write_random_checkpoint
from k3ctl.subparsers import Subparsers
from k3text.special_tokens import special_names
from k3text.vocabulary import write_vocabulary

# Ordinary tokens; with the 256 specials behind them the vocabulary has 1,024.
NUM_BASE_RANKS = 768
# Bounds one image to 1,024 tokens: a tiny model on a CPU should not meet a 16,384-token one.
IN_PATCH_LIMIT = 4096


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "make-checkpoint", help="write a random K3 checkpoint in the released layout"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to create")
    parser.add_argument("--size", choices=SIZES, default="micro")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint; refuses a directory that has something in it."""
    out: Path = args.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        print(f"{out} exists and is not an empty directory", file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    config = random_config(args.size, NUM_BASE_RANKS, args.dtype)
    write_random_checkpoint(out, config, args.seed)
    write_vocabulary(out, NUM_BASE_RANKS)
    for name, data in _side_files(config).items():
        (out / name).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(f"{out}: {args.size}, {config.text.num_layers} layers, width {config.text.hidden_size}")
    return 0


def token_files(config: ModelConfig, num_base_ranks: int) -> dict[str, object]:
    """The JSON files that name special tokens and end an answer, by file name."""
    names = special_names(num_base_ranks)
    return {
        "tokenizer_config.json": {
            "tokenizer_class": "TikTokenTokenizer",
            "model_max_length": config.text.max_position_embeddings,
            "added_tokens_decoder": {
                str(token_id): {"content": name, "special": True}
                for token_id, name in sorted(names.items())
                if not name.startswith("<|reserved_token_")
            },
        },
        "generation_config.json": {
            "eos_token_id": list(config.eos_token_ids),
            "max_length": config.text.max_position_embeddings,
        },
    }


def _side_files(config: ModelConfig) -> dict[str, object]:
    """The JSON files beside weights and vocabulary."""
    return token_files(config, NUM_BASE_RANKS) | {
        "preprocessor_config.json": {
            "media_proc_cfg": {
                "patch_size": 14,
                "merge_kernel_size": 2,
                "in_patch_limit": IN_PATCH_LIMIT,
                "patch_limit_on_one_side": 512,
                "fixed_output_tokens": None,
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
                "transparent_bg_config": {
                    "pattern": "chessboard",
                    "chessboard_square_size": 8,
                    "chessboard_square_on_top_left": True,
                    "chessboard_white_value": 255,
                    "chessboard_gray_value": 180,
                },
                "transparent_bg_fill_stage": "after_resize",
            }
        },
    }
