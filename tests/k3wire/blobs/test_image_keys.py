"""One name of an image's bytes in tier L1, for those who write it and those who read it."""

from pathlib import Path

from k3wire.blobs.image_keys import image_bytes_key

ROOT = Path(__file__).resolve().parents[3]


def test_a_key_is_its_tier_and_the_whole_hash() -> None:
    # Golden: a release that spells it otherwise would find nothing that the one before it kept.
    assert image_bytes_key(bytes(range(32))) == (
        "l1:bytes:000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    )


def test_different_pictures_never_share_a_key() -> None:
    keys = [bytes(31) + bytes([last]) for last in range(256)]
    assert len({image_bytes_key(key) for key in keys}) == 256


def test_nobody_spells_the_key_himself() -> None:
    spelled = [
        str(path.relative_to(ROOT))
        for folder in ("services", "libs", "loadtest")
        for path in sorted((ROOT / folder).glob("**/src/**/*.py"))
        if 'f"l1:bytes' in path.read_text()
    ]
    assert spelled == ["libs/k3wire/src/k3wire/blobs/image_keys.py"]
