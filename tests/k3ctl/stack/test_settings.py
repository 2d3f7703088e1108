"""What `k3 up` reads for itself."""

import pytest

from k3ctl.main import main
from k3ctl.stack.settings import UpSettings, read_up_settings
from k3wire.service.settings import SettingsError


def test_other_variables_are_none_of_its_business() -> None:
    environment = {"HOME": "/", "K3_GATEWAY_PORT": "x", "K3_NATS_URL": "nats://h:1"}
    assert read_up_settings(environment) == UpSettings()


def test_values_are_read() -> None:
    environment = {"K3_UP_FOLDER": "/tmp/k3", "K3_UP_NATS_PORT": "4222"}
    assert read_up_settings(environment) == UpSettings(folder="/tmp/k3", nats_port=4222)


def test_all_faults_are_named_at_once() -> None:
    environment = {
        "K3_UP_NAT_PORT": "1", "K3_UP_REDIS_PORT": "65536", "K3_UP_SEGMENT_BYTES": "lots",
    }  # fmt: skip
    with pytest.raises(SettingsError) as caught:
        read_up_settings(environment)
    assert all(name in str(caught.value) for name in environment)


def test_every_command_that_reads_them_refuses_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("K3_UP_FOLDR", "x")
    for command in ("up", "status"):
        assert main([command]) == 2
        assert capsys.readouterr().err.count("\n") == 1
