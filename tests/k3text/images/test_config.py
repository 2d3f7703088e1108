import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from k3ctl.commands.make_checkpoint import add_parser
from k3text.images.config import (
    Background,
    ProcessorConfig,
    ProcessorConfigError,
    read_processor_config,
)


def write(folder: Path, media: object) -> Path:
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": media}))
    return folder


RELEASED = {
    "in_patch_limit": 65536,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 512,
    "in_patch_limit_each_frame": 16384,
    "in_patch_limit_video": 655360,
    "sample_fps": 8.0,
    "transparent_bg_config": {
        "pattern": "chessboard",
        "chessboard_square_size": 8,
        "chessboard_square_on_top_left": True,
        "chessboard_white_value": 255,
        "chessboard_gray_value": 180,
    },
    "transparent_bg_fill_stage": "after_resize",
}


def test_the_released_file_gives_the_defaults(tmp_path: Path) -> None:
    assert read_processor_config(write(tmp_path, RELEASED)) == ProcessorConfig()


def test_a_checkpoint_without_the_file_gives_the_defaults(tmp_path: Path) -> None:
    assert read_processor_config(tmp_path) == ProcessorConfig()


def test_a_background_without_details_gets_the_released_codes_own(tmp_path: Path) -> None:
    media = {**RELEASED, "transparent_bg_config": {"pattern": "chessboard"}}
    del media["transparent_bg_fill_stage"]
    found = read_processor_config(write(tmp_path, media))
    assert found.background == Background(square_size=16, gray_value=200)
    assert found.fill_stage == "before_resize"


def test_a_background_of_null_drops_alpha(tmp_path: Path) -> None:
    media = {**RELEASED, "transparent_bg_config": None}
    assert read_processor_config(write(tmp_path, media)).background is None


def test_a_merge_kernel_may_be_a_pair(tmp_path: Path) -> None:
    media = {**RELEASED, "merge_kernel_size": [4, 4]}
    assert read_processor_config(write(tmp_path, media)).merge_size == 4


@pytest.mark.parametrize(
    "change",
    [
        {"patch_size": 0},
        {"patch_size": "14"},
        {"merge_kernel_size": [2, 1]},
        {"image_std": [0.5, 0.0, 0.5]},
        {"image_mean": [0.5]},
        {"fixed_output_tokens": 64},
        {"transparent_bg_fill_stage": "later"},
        {"transparent_bg_config": {"pattern": "stripes"}},
        {"transparent_bg_config": {"pattern": "chessboard", "chessboard_square_size": 0}},
        {"transparent_bg_config": {"pattern": "chessboard", "chessboard_white_value": 256}},
    ],
)
def test_a_value_that_cannot_be_used_stops_the_start(
    tmp_path: Path, change: dict[str, object]
) -> None:
    with pytest.raises(ProcessorConfigError, match="preprocessor_config"):
        read_processor_config(write(tmp_path, {**RELEASED, **change}))


def test_a_file_that_is_no_json_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ProcessorConfigError):
        read_processor_config(tmp_path)


def test_a_checkpoint_of_ours_differs_from_the_released_one_only_in_its_patch_limit(
    tmp_path: Path,
) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["make-checkpoint", "--out", str(tmp_path / "made")])
    assert args.run(args) == 0
    found = read_processor_config(tmp_path / "made")
    assert found == ProcessorConfig(max_patches=4096)


def test_the_version_names_every_codec_that_can_change_a_pixel() -> None:
    version = ProcessorConfig().version
    for name in ("k3-image/", "pillow/", "jpeg-turbo/", "webp/", "avif/"):
        assert name in version


READ_AND_COLLECT = """
import gc, sys
from pathlib import Path
from k3text.images.config import read_processor_config
read_processor_config(Path(sys.argv[1]))
gc.collect()
"""


def test_the_collector_survives_the_decoder(tmp_path: Path) -> None:
    # In a process of its own: what this looks for is a crash of the interpreter.
    (tmp_path / "preprocessor_config.json").write_text('{"media_proc_cfg": {}}')
    command = [sys.executable, "-c", READ_AND_COLLECT, str(tmp_path)]
    assert subprocess.run(command, check=False, timeout=30).returncode == 0
