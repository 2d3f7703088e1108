"""Real files, mutated at random, through the sandbox: a picture or an image error, never more."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from support.hostile_images import all_cases
from support.pictures import encode, gradient

from k3text.images.config import ProcessorConfig
from k3text.images.geometry import plan
from k3text.images.header import (
    DEFAULT_MEDIA_TYPES,
    OPTIONAL_MEDIA_TYPES,
    ImageLimits,
    read_header,
)
from k3text.images.processor import cut
from k3text.images.sandbox import Sandbox, SandboxConfig
from k3wire.errors import ImageError

MAX_BASE_BYTES = 20_000
NUM_MUTANTS = 400

# Mutants that announce millions of pixels and keep the promise cost a second each and prove nothing.
ALL = ImageLimits(media_types=DEFAULT_MEDIA_TYPES | OPTIONAL_MEDIA_TYPES, max_pixels=1_000_000)
K3 = ProcessorConfig(version="test")

Mutation = Callable[[random.Random, bytes, bytes], bytes]


def flip_bits(rng: random.Random, data: bytes, other: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def overwrite(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at, length = rng.randrange(len(data)), rng.randint(1, 16)
    filler = rng.choice([b"\0", b"\xff", b"\x7f\xff\xff\xff", rng.randbytes(length)])
    return data[:at] + (filler * length)[:length] + data[at + length :]


def cut_out(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.randint(1, 200) :]


def repeat(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at, length = rng.randrange(len(data)), rng.randint(1, 200)
    return data[:at] + data[at : at + length] * rng.randint(2, 20) + data[at + length :]


def cut_off(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data))] + other[rng.randrange(len(other)) :]


def damage_the_front(rng: random.Random, data: bytes, other: bytes) -> bytes:
    front = flip_bits(rng, data[:64], other)
    return front + data[64:]


MUTATIONS: tuple[Mutation, ...] = (
    flip_bits,
    overwrite,
    cut_out,
    repeat,
    cut_off,
    splice,
    damage_the_front,
)


@pytest.mark.parametrize("seed", range(3))
async def test_pre_08_a_mutated_file_is_a_picture_or_an_image_error_and_harms_nobody(
    seed: int,
) -> None:
    rng = random.Random(seed)
    bases = [case.data for case in all_cases() if case.data and len(case.data) < MAX_BASE_BYTES]
    neighbour = encode(gradient(60, 40), "JPEG", quality=95)
    expected = cut(neighbour, K3).pixels
    num_pictures = num_errors = 0
    async with Sandbox(K3, ALL, SandboxConfig(num_workers=1)) as sandbox:
        before = sandbox.pids
        for number in range(NUM_MUTANTS):
            mutation = rng.choice(MUTATIONS)
            data = mutation(rng, rng.choice(bases), rng.choice(bases))
            try:
                found = (await sandbox.cut(data)).patched
            except ImageError:
                num_errors += 1
            else:
                # What the gateway counted from the header is what came.
                header = read_header(data, ALL)
                assert (found.width, found.height) == (header.width, header.height)
                geometry = plan(header.width, header.height, K3)
                assert found.grid_thw == geometry.grid_thw
                assert len(found.pixels) == 4 * found.num_tokens
                num_pictures += 1
            if number % 20 == 0:
                after = (await sandbox.cut(neighbour)).patched.pixels
                np.testing.assert_array_equal(after, expected)
        assert sandbox.pids == before
    # Mutants that are all errors would prove little of decoders, and all pictures little of checks.
    assert num_pictures > NUM_MUTANTS // 20
    assert num_errors > NUM_MUTANTS // 4
