"""The start: settings that cannot be used end it, named in one line."""

import os

import pytest

from k3_fetcher import main


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("K3_FETCHER_ALLOWED_NETWORK", "10.0.0.0/8"),
        ("K3_FETCHER_ALLOWED_NETWORKS", "10.0.0/33"),
        ("K3_FETCHER_ALLOWED_PORTS", "80,http"),
        ("K3_FETCHER_ALLOW_HTTP", "perhaps"),
        ("K3_FETCHER_MAX_RETRIES", "many"),
        ("K3_NONSENSE", "1"),
    ],
)
def test_wrong_settings_stop_the_start_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    for known in [key for key in os.environ if key.startswith("K3_")]:
        monkeypatch.delenv(known)
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert name in text
    assert text.count("\n") == 1
