import dataclasses
import hashlib
import itertools

from k3text.images.config import Background, ProcessorConfig
from k3text.images.keys import config_digest, content_key, feature_key

BASE = ProcessorConfig(version="test")


def test_cac_01_a_content_key_is_the_sha_256_of_the_encoded_bytes() -> None:
    assert content_key(b"picture") == hashlib.sha256(b"picture").digest()


def test_cac_01_every_rule_and_the_version_change_the_feature_key() -> None:
    content = content_key(b"picture")
    changes: list[dict[str, object]] = [
        {"patch_size": 16},
        {"merge_size": 4},
        {"max_patches": 65_535},
        {"max_patches_a_side": 511},
        {"mean": (0.5, 0.5, 0.25)},
        {"std": (0.25, 0.5, 0.5)},
        {"background": None},
        {"background": Background(pattern="white")},
        {"background": Background(square_size=16)},
        {"background": Background(is_white_top_left=False)},
        {"background": Background(white_value=254)},
        {"background": Background(gray_value=181)},
        {"fill_stage": "before_resize"},
        {"version": "test2"},
    ]
    changed = {name for change in changes for name in change}
    assert changed == {field.name for field in dataclasses.fields(ProcessorConfig)}
    configs = [BASE, *(dataclasses.replace(BASE, **change) for change in changes)]  # pyright: ignore[reportArgumentType]
    keys = [feature_key(content, config) for config in configs]
    assert all(one != other for one, other in itertools.combinations(keys, 2))


def test_cac_03_keys_are_whole_and_stable_between_processes_and_releases() -> None:
    """Shared caches outlive a process: these bytes change only with the domain tags."""
    assert config_digest(BASE).hex() == (
        "d2c3d944a4a453501a20d0801cb5cfc32f1701a67595e257a9a96000c537f76d"
    )
    assert feature_key(content_key(b""), BASE).hex() == (
        "231949c13b045dcad2076a2e8130e53c9ac2dda742b78de07c6436ceb502c0c7"
    )


def test_cac_01_fields_are_framed_so_that_no_two_lists_of_fields_collide() -> None:
    split = dataclasses.replace(BASE, version="ab")
    assert feature_key(content_key(b"x"), split) != feature_key(
        content_key(b"x"), dataclasses.replace(BASE, version="a")
    )
    one = dataclasses.replace(BASE, patch_size=1, merge_size=11)
    other = dataclasses.replace(BASE, patch_size=11, merge_size=1)
    assert config_digest(one) != config_digest(other)
