"""What a prompt would take this engine, by the steps that it has run.

One rate of tokens a second cannot say what a prefix is worth: a short last step takes almost as
long as a longer one, and a token far into a prompt takes longer than one at its start, for in the
layers with full attention it looks at all before it. So there are three costs: of a step, of a
token, and of a pair of tokens.
"""

from dataclasses import dataclass

from k3wire.costs import CostFit

DOUBTS = (0.01, 0.0, 0.03)
"""Against a step's, a token's and a pair's cost; see `k3wire.costs`."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds that prompt tokens take here; all 0 until something was measured.

    Attributes:
        step_s: a step, whatever it holds.
        token_s: each of its tokens.
        pair_s: each pair of a token and one that it looks at, itself included.
        chunk_tokens: longest chunk of a prompt, so long prompts take several steps.
    """

    step_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0
    chunk_tokens: int = 1

    def predict_s(self, start: int, end: int) -> float:
        """Seconds to compute a prompt's tokens from `start` to before `end`, alone."""
        num_tokens = end - start
        num_steps = -(-num_tokens // self.chunk_tokens)
        pairs = num_pairs(start, num_tokens)
        return self.step_s * num_steps + self.token_s * num_tokens + self.pair_s * pairs


def num_pairs(start: int, length: int) -> int:
    """Pairs of a token and one that it looks at, in a chunk after `start` tokens."""
    return length * start + length * (length + 1) // 2


class StepFit:
    """Learns the costs from steps."""

    def __init__(self, chunk_tokens: int) -> None:
        """Knows nothing yet; `chunk_tokens` is the longest chunk of a step."""
        self._chunk_tokens = chunk_tokens
        self._fit = CostFit(DOUBTS)

    @property
    def costs(self) -> StepCosts:
        """The costs by all that was learnt."""
        return StepCosts(*self._fit.costs, chunk_tokens=self._chunk_tokens)

    def learn(self, tokens: int, pairs: int, seconds: float) -> None:
        """Takes one step of prompt tokens only.

        Args:
            tokens: in it, at least 1.
            pairs: of its rows together, by `num_pairs`.
            seconds: that it took, above 0.
        """
        self._fit.learn((1, tokens, pairs), seconds)
