import pytest

from k3_preprocessor.settings import PreprocessorSettings
from k3text.images.header import DEFAULT_MEDIA_TYPES, ImageLimits
from k3text.images.sandbox import SandboxConfig
from k3wire.service.settings import SettingsError, load_settings


def test_defaults_are_those_of_the_library() -> None:
    settings = load_settings(PreprocessorSettings, {})
    limits, sandbox = ImageLimits(), SandboxConfig()
    assert frozenset(settings.media_types) == DEFAULT_MEDIA_TYPES
    assert (settings.max_image_bytes, settings.max_pixels) == (limits.max_bytes, limits.max_pixels)
    assert (settings.num_workers, settings.max_waiting) == (
        sandbox.num_workers,
        sandbox.max_waiting,
    )
    assert settings.decode_memory_bytes == sandbox.limits.memory_bytes
    assert (settings.decode_cpu_s, settings.decode_wall_s) == (
        sandbox.limits.cpu_s,
        sandbox.limits.wall_s,
    )


def test_formats_are_a_list_separated_by_commas() -> None:
    environment = {"K3_PREPROCESSOR_MEDIA_TYPES": "image/png, image/avif"}
    settings = load_settings(PreprocessorSettings, environment)
    assert settings.media_types == ("image/png", "image/avif")


def test_every_wrong_variable_is_named_at_once() -> None:
    environment = {"K3_PREPROCESSOR_WORKERS": "many", "K3_PREPROCESSOR_WROKERS": "2"}
    with pytest.raises(SettingsError) as raised:
        load_settings(PreprocessorSettings, environment)
    assert "K3_PREPROCESSOR_WORKERS" in str(raised.value)
    assert "K3_PREPROCESSOR_WROKERS" in str(raised.value)
