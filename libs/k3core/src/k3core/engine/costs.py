"""What steps cost, fitted to the steps that ran, and what a prompt would therefore take.

What enters are steps with their seconds; what leaves is `StepCosts`: seconds a step, a token, and a
pair of tokens, for a token looks at all before it in the layers with full attention. One rate of
tokens a second cannot say what a prefix is worth: a short last step takes almost as long as a
longer one, and a token far into a prompt takes longer than one at its start.

Steps are kept in groups of like length, each forgetting its own oldest: a thousand short prompts
teach nothing about a long one, nor may they make what is known of it forgotten. Errors count by
their share of the step, so short steps are met as well as long ones. No coefficient is negative,
so a longer part of a prompt never costs less than a shorter one.
"""

from dataclasses import dataclass
from itertools import combinations

KEPT_SHARE = 0.9
"""What the next step of its group leaves of a step's weight: about ten steps decide."""

DOUBTS = (0.01, 0.0, 0.03)
"""Relative weight against a cost of a step, a token and a pair. Steps that are all alike do not
tell which of them it is: then it is the token."""

_NUM_COSTS = 3
_CHOICES = tuple(choice for count in (3, 2, 1) for choice in combinations(range(_NUM_COSTS), count))


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


class CostFit:
    """Learns the costs, by least squares of relative errors over groups of like steps."""

    def __init__(self, chunk_tokens: int) -> None:
        """Knows nothing yet.

        Args:
            chunk_tokens: longest chunk of a step.
        """
        self._chunk_tokens = chunk_tokens
        self._groups: dict[int, _Group] = {}
        self._costs: StepCosts | None = StepCosts(chunk_tokens=chunk_tokens)

    @property
    def costs(self) -> StepCosts:
        """The costs by all that was learnt."""
        if self._costs is None:
            self._costs = StepCosts(*self._solve(), self._chunk_tokens)
        return self._costs

    def learn(self, tokens: int, pairs: int, seconds: float) -> None:
        """Takes one step of prompt tokens only.

        Args:
            tokens: in it, at least 1.
            pairs: of its rows together, by `num_pairs`.
            seconds: that it took, above 0.
        """
        group = self._groups.setdefault(pairs.bit_length(), _Group())
        group.add((1.0 / seconds, tokens / seconds, pairs / seconds))
        self._costs = None

    def _solve(self) -> tuple[float, float, float]:
        """The best costs that are not negative: the best of each choice of which are not zero."""
        square = [[0.0] * _NUM_COSTS for _ in range(_NUM_COSTS)]
        right = [0.0] * _NUM_COSTS
        for group in self._groups.values():
            for i in range(_NUM_COSTS):
                right[i] += group.sums[i] / group.weight
                for j in range(_NUM_COSTS):
                    square[i][j] += group.products[i][j] / group.weight
        for i, doubt in enumerate(DOUBTS):
            square[i][i] *= 1.0 + doubt
        found: tuple[float, tuple[float, float, float]] = (0.0, (0.0, 0.0, 0.0))
        for choice in _CHOICES:
            costs = _least_squares(square, right, choice)
            # What is left of the error is a constant less this.
            gain = sum(cost * right[i] for i, cost in enumerate(costs))
            if min(costs) >= 0.0 and gain > found[0]:
                found = (gain, costs)
        return found[1]


class _Group:
    """Sums over the steps of one group, older ones weighing less."""

    __slots__ = ("products", "sums", "weight")

    def __init__(self) -> None:
        self.weight = 0.0
        self.sums = [0.0] * _NUM_COSTS
        self.products = [[0.0] * _NUM_COSTS for _ in range(_NUM_COSTS)]

    def add(self, parts: tuple[float, float, float]) -> None:
        """Takes a step: its count of each cost, over the seconds it took."""
        self.weight = KEPT_SHARE * self.weight + 1.0
        for i, part in enumerate(parts):
            self.sums[i] = KEPT_SHARE * self.sums[i] + part
            row = self.products[i]
            for j, other in enumerate(parts):
                row[j] = KEPT_SHARE * row[j] + part * other


def _least_squares(
    square: list[list[float]], right: list[float], choice: tuple[int, ...]
) -> tuple[float, float, float]:
    """Solves the normal equations of the chosen costs; the others are zero."""
    rows = [[*(square[i][j] for j in choice), right[i]] for i in choice]
    size = len(choice)
    for k in range(size):
        # The matrix is positive definite, by the doubts: no exchange of rows is needed.
        for i in range(size):
            if i != k:
                factor = rows[i][k] / rows[k][k]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[k], strict=True)]
    costs = [0.0] * _NUM_COSTS
    for place, i in enumerate(choice):
        costs[i] = rows[place][size] / rows[place][place]
    return costs[0], costs[1], costs[2]
