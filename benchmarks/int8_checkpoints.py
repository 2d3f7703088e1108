"""What keeping states in INT8 costs: accuracy of k3-nano before and after ten generations.

Every question is asked twice of the shipped checkpoint, through the real engine: plainly, and in
eleven pieces of which each but the first starts from the INT8 checkpoint that the piece before it
left (saved, restored, continued, saved again). A skill holds if its accuracy after ten generations
lies in the 95 % interval of the plain one; bytes hold if a checkpoint of the released K3 takes at
most 0.30 of a raw one. Exits 1 if anything does not hold.

    PYTHONPATH=tools OMP_NUM_THREADS=2 python benchmarks/int8_checkpoints.py
"""

import argparse
import sys
from pathlib import Path

from k3core.cache.layout import ModelSizes, int8_state_bytes, model_sizes, raw_state_bytes
from k3core.cache.spec import Codec
from k3core.engine.local import LocalEngine
from k3core.engine.parts import EngineSizes
from k3core.weights.config_file import load_config
from train_nano.evaluate import Evaluation, Result
from train_nano.generations import Generations

NANO = Path(__file__).parents[1] / "checkpoints" / "k3-nano"
SKILLS = (
    "colour",
    "shape",
    "count",
    "tool call",
    "tool result",
    "variables",
    "needle, 1k tokens",
    "JSON",
)
# So small that the shortest prompt has ten ends of units outside of its pictures.
UNIT = 4
SEED = 1
# The released K3 at eight ranks: 24 MLA and 69 KDA layers, fp8 rows, bfloat16 windows.
K3_TP8 = ModelSizes(24, 576, 576, 69, 12, 128, 4, 2)
MOST_BYTES = 0.30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=float, default=0.5, help="of a full evaluation's questions")
    parser.add_argument("--generations", type=int, default=10)
    args = parser.parse_args()
    plain, kept = asked("raw", 0), asked("int8", args.generations)
    raw, packed = Evaluation(NANO, SEED, plain), Evaluation(NANO, SEED, kept)
    print(f"{'skill':20} {'questions':>9}  {'raw, 95 % interval':26} {'INT8':26} other tokens")
    has_left: list[str] = []
    for skill in SKILLS:
        first = len(plain.answers)
        before, after = raw.measure(skill, args.share), packed.measure(skill, args.share)
        low, high = before.interval
        if not low <= after.accuracy <= high:
            has_left.append(skill)
        pairs = zip(plain.answers[first:], kept.answers[first:], strict=True)
        num_other = sum(a != b for a, b in pairs)
        print(
            f"{skill:20} {before.num_probes:9}  {shown(before):26} {shown(after):26} {num_other}",
            flush=True,
        )
    sizes = model_sizes(load_config(NANO).text, row_itemsize=4, conv_itemsize=4)
    share = ratio(K3_TP8)
    print(f"bytes of a checkpoint against raw: K3 at TP8 {share:.3f}, k3-nano {ratio(sizes):.3f}")
    if has_left:
        print(f"left the interval: {', '.join(has_left)}")
    sys.exit(1 if has_left or share > MOST_BYTES else 0)


def asked(codec: Codec, num_generations: int) -> Generations:
    sizes = EngineSizes(arena_bytes=512 << 20, unit_tokens=UNIT, codec=codec)
    placeholder = load_config(NANO).media_placeholder_token_id
    return Generations(LocalEngine(NANO, sizes), UNIT, placeholder, num_generations)


def shown(result: Result) -> str:
    low, high = result.interval
    return f"{result.accuracy:6.1%} ({low:.1%} to {high:.1%})"


def ratio(sizes: ModelSizes) -> float:
    return int8_state_bytes(sizes) / raw_state_bytes(sizes)


if __name__ == "__main__":
    main()
