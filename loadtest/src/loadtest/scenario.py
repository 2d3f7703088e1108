"""A load scenario, read from TOML; every unknown key is refused by name."""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path


class ScenarioError(Exception):
    """The scenario file cannot be used; the message names the key."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to send, how fast and what counts as good.

    Attributes:
        name: shown in the report.
        arrivals: `constant`, `poisson` or `burst`.
        rate_rps: mean requests a second.
        duration_s: how long requests are sent.
        warmup_s: requests intended earlier than this are sent but not counted.
        burst_factor: rate of the middle third, for `burst`.
        seed: of arrivals and prompts.
        num_prefixes: shared conversation beginnings to draw from; 0 for none.
        prefix_words: words of a shared beginning.
        prompt_words: words of the unshared rest.
        output_tokens: max_completion_tokens.
        num_images: images in each request.
        image_pool: distinct images to draw from.
        cancel_share: share of requests whose client leaves after the first token.
        is_stream: whether answers are streamed.
        temperature: of all requests.
        limit_ttft_ms: a request over it does not count for goodput.
        limit_itl_ms: likewise, for the mean gap between tokens.
    """

    name: str = "steady"
    arrivals: str = "poisson"
    rate_rps: float = 2.0
    duration_s: float = 10.0
    warmup_s: float = 1.0
    burst_factor: float = 5.0
    seed: int = 0
    num_prefixes: int = 0
    prefix_words: int = 0
    prompt_words: int = 32
    output_tokens: int = 16
    num_images: int = 0
    image_pool: int = 4
    cancel_share: float = 0.0
    is_stream: bool = True
    temperature: float = 0.0
    limit_ttft_ms: float = 2000.0
    limit_itl_ms: float = 200.0


def load_scenario(path: Path) -> Scenario:
    """Reads a scenario.

    Raises:
        ScenarioError: not TOML, an unknown key, or a value of the wrong type.
    """
    try:
        table = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{path.name} is not valid TOML: {error}") from error
    known = {field.name: field for field in fields(Scenario)}
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise ScenarioError(f"{path.name} has unknown keys: {', '.join(unknown)}")
    defaults = Scenario()
    for name, value in table.items():
        wanted = type(getattr(defaults, name))
        fits = isinstance(value, wanted) or (wanted is float and isinstance(value, int))
        if not fits or (isinstance(value, bool) and wanted is not bool):
            raise ScenarioError(f"{path.name}: {name} must be of type {wanted.__name__}")
    return Scenario(**table)
