"""Text of lessons, from which the vocabulary is learned."""

import random

from k3text.images.config import ProcessorConfig
from train_nano import acting
from train_nano.lessons import MODES, Lessons
from train_nano.model import MAX_PATCHES
from train_nano.rows import written_text
from train_nano.words import NOUNS, PEOPLE, PLACES

NUM_LESSONS = 1500
FILLER_CHARACTERS = 300
WORD_REPEATS = 60
"""So often each known word stands in the text in each of its forms, to become one token."""


def sample_text(seed: int) -> str:
    """What assistants and users write in lessons, markers left out, and every known word."""
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
            talk = lessons.needle(draw, FILLER_CHARACTERS, 3, 3)
        texts.append(written_text(talk, draw.choice(MODES), config))
    known = [*NOUNS, *acting.NOUNS, *acting.VERBS, *acting.KEYS, *acting.NUMBER_KEYS]
    forms = [f"{word} {word}" for word in (*known, *PEOPLE, *PLACES)]
    forms += [f"_{noun}" for noun in acting.NOUNS]
    return "\n".join(texts) + "\n" + "\n".join(forms * WORD_REPEATS)
