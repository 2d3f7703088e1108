import asyncio
import random

from support.golden_model import MICRO_A
from support.worker_pair import WAIT_S, worker_pair

from k3core.engine.assembly import ModelOptions, model_engine
from k3core.engine.local import LocalEngine, LocalRequest
from k3core.engine.parts import EngineSizes
from k3wire.messages.sampling import SamplingParams

UNIT = 16
SIZES = EngineSizes(arena_bytes=8 << 20, unit_tokens=UNIT, chunk_tokens=48)


def prompts() -> list[list[int]]:
    """Lengths around every boundary of units and chunks, over shared and fresh beginnings."""
    draw = random.Random(31)
    stem = [draw.randrange(200) for _ in range(130)]
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 80, 95, 96, 97, 128, 129]
    shared = [stem[:length] for length in lengths]
    fresh = [stem[: length // 2] + [draw.randrange(200) for _ in range(9)] for length in lengths]
    return shared + fresh


def sampling(index: int) -> SamplingParams:
    if index % 3 == 0:
        return SamplingParams(temperature=0.9, top_p=0.9, seed=index, max_tokens=5)
    penalty = 1.3 if index % 3 == 1 else 1.0
    return SamplingParams(temperature=0.0, max_tokens=5, repetition_penalty=penalty)


def test_every_length_hands_over_cold_and_warm_to_the_tokens_of_one_process() -> None:
    asked = prompts()
    engine = LocalEngine(MICRO_A, SIZES)
    expected = [
        engine.generate_all([LocalRequest(prompt, sampling(index), salt=str(index))])[0].token_ids
        for index, prompt in enumerate(asked)
    ]

    async def run() -> None:
        options = ModelOptions(MICRO_A)
        prefill = model_engine(options, "prefill", SIZES)
        decode = model_engine(options, "decode", SIZES)
        async with asyncio.timeout(20 * WAIT_S), worker_pair(prefill, decode) as pair:
            gateway = pair.gateway
            for round_name in ("cold", "warm"):
                names = [f"{round_name}-{index}" for index in range(len(asked))]
                for index, name in enumerate(names):
                    params = sampling(index)
                    fields = {field: getattr(params, field) for field in params.__struct_fields__}
                    await gateway.send(
                        gateway.request(name, asked[index], timeout_s=90.0, **fields)
                    )
                for name, tokens in zip(names, expected, strict=True):
                    await gateway.until_ended(name, timeout_s=8 * WAIT_S)
                    assert tuple(gateway.tokens(name)) == tokens, name
            await gateway.until_idle(pair.num_pages)

    asyncio.run(run())
