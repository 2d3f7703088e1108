"""Settings: read once, named when wrong, all at once."""

from typing import Annotated, Literal

import pytest

from k3wire.service.settings import (
    CommonSettings,
    Setting,
    SettingsError,
    fields_of,
    load_settings,
    settings_or_exit,
)


class EncoderLike(CommonSettings, frozen=True, kw_only=True):
    checkpoint: Annotated[str, Setting("K3_CHECKPOINT", "Folder.")]
    size: Annotated[int, Setting("K3_ENCODER_SIZE", "Bytes.", "bytes")] = 7
    rate: Annotated[float, Setting("K3_ENCODER_RATE", "Share.")] = 0.5
    is_on: Annotated[bool, Setting("K3_ENCODER_ON", "Switch.")] = False
    kind: Annotated[Literal["tcp", "rdma"], Setting("K3_ENCODER_KIND", "How.")] = "tcp"
    names: Annotated[tuple[str, ...], Setting("K3_ENCODER_NAMES", "List.")] = ("a",)
    ports: Annotated[tuple[int, ...], Setting("K3_ENCODER_PORTS", "List.")] = ()


def load(**environment: str) -> EncoderLike:
    return load_settings(EncoderLike, {"K3_CHECKPOINT": "here", **environment})


def test_values_are_read_as_their_types() -> None:
    found = load(
        K3_ENCODER_SIZE="12", K3_ENCODER_RATE="1e-3", K3_ENCODER_ON="Yes", K3_ENCODER_KIND="rdma",
        K3_ENCODER_NAMES=" x, y ,,", K3_ENCODER_PORTS="80, 443", K3_NATS_URL="nats://b:1",
        PATH="/bin", K3D_OTHER="x",
    )  # fmt: skip
    assert (found.checkpoint, found.size, found.rate, found.is_on) == ("here", 12, 0.001, True)
    assert (found.kind, found.names, found.ports) == ("rdma", ("x", "y"), (80, 443))
    assert found.nats_url == "nats://b:1"
    assert load() == EncoderLike(checkpoint="here")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("K3_ENCODER_SIZE", "many"), ("K3_ENCODER_SIZE", ""), ("K3_ENCODER_SIZE", "1.5"),
        ("K3_ENCODER_RATE", "half"), ("K3_ENCODER_ON", "perhaps"), ("K3_ENCODER_KIND", "udp"),
        ("K3_ENCODER_PORTS", "80,http"), ("K3_ENCODER_SIZES", "1"), ("K3_NATS", "x"),
        ("K3_", "x"), ("K3_HEALTH_PORT", "http"),
    ],
)  # fmt: skip
def test_unknown_and_malformed_variables_stop_the_start_by_name(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        load(**{name: value})


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(EncoderLike, {"K3_ENCODER_SIZE": "x", "K3_TYPO": "1", "K3_ENCODER_TYPO": ""})
    for name in ("K3_ENCODER_SIZE", "K3_TYPO", "K3_ENCODER_TYPO", "K3_CHECKPOINT"):
        assert name in str(caught.value)


def test_variables_of_other_services_may_stand_beside() -> None:
    assert load(K3_PREFILL_CHUNK="1", K3_REDIS_URL="redis://x", K3_UP_FOLDER="f").size == 7


def test_a_wrong_start_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        settings_or_exit(EncoderLike, {"K3_TYPO": "1"})
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert "K3_TYPO" in text


def test_every_shared_setting_says_what_it_means() -> None:
    for setting, _ in fields_of(CommonSettings).values():
        assert setting.name.startswith("K3_")
        assert setting.meaning.endswith(".")
