"""Answers from states that were kept and taken up again many times over.

A question is computed in pieces: each piece ends on a match unit, where the engine keeps a
checkpoint in the form it was told to, and the next piece starts from that checkpoint and nothing
else. So whatever a checkpoint's form costs, the answer has paid it once a piece.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from k3core.engine.local import LocalAnswer, LocalEngine, LocalRequest


class Generations:
    """Asks an engine so that every answer starts from a checkpoint of the n-th generation.

    Attributes:
        answers: token ids of every answer so far, in the order of the questions.
    """

    def __init__(
        self, engine: LocalEngine, unit_tokens: int, placeholder: int | None, num_generations: int
    ) -> None:
        """Keeps the engine; it may be shared, but by none that asks in as many generations.

        Args:
            engine: with a `prompt_end` retention and room for all questions of one call.
            unit_tokens: of a match unit of it.
            placeholder: token of a picture's rows, inside of which no prompt can be cut.
            num_generations: times that a state is kept and restored before the answer; 0 asks
                plainly.
        """
        self._engine = engine
        self._unit_tokens = unit_tokens
        self._placeholder = placeholder
        self._num_generations = num_generations
        self._num_asked = 0
        self.answers: list[tuple[int, ...]] = []

    def generate_all(self, requests: Sequence[LocalRequest]) -> list[LocalAnswer]:
        """Answers each request, as `LocalEngine.generate_all` does.

        Raises:
            ValueError: a prompt is too short for so many generations.
        """
        alone = [
            replace(request, salt=f"{self._num_generations}/{self._num_asked + index}")
            for index, request in enumerate(requests)
        ]
        self._num_asked += len(alone)
        cuts = [self._cuts(request.prompt_ids) for request in alone]
        restored = [0] * len(alone)
        for generation in range(self._num_generations):
            ends = [each[generation] for each in cuts]
            pieces = [self._up_to(one, end) for one, end in zip(alone, ends, strict=True)]
            self._answer(pieces, restored)
            restored = ends
        answers = self._answer(alone, restored)
        self.answers += [answer.token_ids for answer in answers]
        return answers

    def _answer(
        self, requests: Sequence[LocalRequest], restored: Sequence[int]
    ) -> list[LocalAnswer]:
        answers = self._engine.generate_all(requests)
        found = [answer.usage.cached_local for answer in answers]
        # Without the checkpoint of the generation before, this would measure something else.
        assert found == list(restored), f"restored at {found}, kept at {restored}"
        return answers

    def _up_to(self, request: LocalRequest, end: int) -> LocalRequest:
        """The first `end` tokens, answered by a token that nobody reads."""
        prompt = request.prompt_ids[:end]
        is_row = [token == self._placeholder for token in prompt]
        num_pictures = sum(
            here and not before for before, here in zip([False, *is_row], is_row, strict=False)
        )
        sampling = msgspec.structs.replace(request.sampling, max_tokens=1)
        return replace(
            request, prompt_ids=prompt, images=request.images[:num_pictures], sampling=sampling
        )

    def _cuts(self, prompt: Sequence[int]) -> list[int]:
        """Places to cut a prompt at, spread over it: ends of units outside of pictures."""
        places = [
            end
            for end in range(self._unit_tokens, len(prompt), self._unit_tokens)
            if self._placeholder not in (prompt[end - 1], prompt[end])
        ]
        count = self._num_generations
        if len(places) < count:
            raise ValueError(f"a prompt of {len(prompt)} tokens has no {count} places to cut it")
        return [places[(index + 1) * len(places) // count - 1] for index in range(count)]
