"""Text of lessons, from which the vocabulary is learned."""

import random

from k3text.images.config import ProcessorConfig
from train_nano.lessons import MODES, Lessons
from train_nano.model import MAX_PATCHES
from train_nano.rows import written_text

NUM_LESSONS = 1500


def sample_text(seed: int) -> str:
    """What assistants and users write in lessons, markers left out."""
    config = ProcessorConfig(max_patches=MAX_PATCHES)
    lessons = Lessons("train", config)
    draw = random.Random(f"vocabulary/{seed}")
    texts: list[str] = []
    for index in range(NUM_LESSONS):
        kind = index % 3
        if kind == 0:
            talk = lessons.picture(draw)
        elif kind == 1:
            talk = lessons.text(draw)
        else:
            talk = lessons.needle(draw, 800, 3, 3)
        texts.append(written_text(talk, draw.choice(MODES), config))
    return "\n".join(texts)
