"""What work costs, fitted to the work that was done, and what other work would therefore take.

What enters are pieces of work, each as its counts (steps, tokens, pixels) and its seconds; what
leaves is the cost of each counted thing. An average of rates would not do: what a piece costs
whatever its size weighs on short ones, so short ones would make long ones look dear.

Pieces are kept in groups of like size, each forgetting its own oldest: a thousand short ones teach
nothing about a long one, nor may they make what is known of it forgotten. Errors count by their
share of the seconds, so short pieces are met as well as long ones. No cost is negative, so more
work never costs less. Pure arithmetic, no clock.
"""

from collections.abc import Sequence
from itertools import combinations

KEPT_SHARE = 0.9
"""What the next piece of its group leaves of a piece's weight: about ten pieces decide."""


class CostFit:
    """Learns costs by least squares of relative errors over groups of like pieces."""

    def __init__(self, doubts: Sequence[float]) -> None:
        """Knows nothing yet.

        Args:
            doubts: relative weight against each cost, at most one of them 0. Pieces that are all
                alike do not tell which cost it is: then it is the one of least doubt.
        """
        self._doubts = tuple(doubts)
        self._groups: dict[int, _Group] = {}
        self._costs: tuple[float, ...] | None = (0.0,) * len(doubts)

    @property
    def costs(self) -> tuple[float, ...]:
        """Seconds of each counted thing; all 0 until something was learnt."""
        if self._costs is None:
            self._costs = self._solve()
        return self._costs

    def predict_s(self, counts: Sequence[float]) -> float:
        """Seconds that a piece of work would take."""
        return sum(cost * count for cost, count in zip(self.costs, counts, strict=True))

    def learn(self, counts: Sequence[float], seconds: float) -> None:
        """Takes a piece of work.

        Args:
            counts: of each thing in it, above 0; the last one tells its size.
            seconds: that it took, above 0.
        """
        size = len(self._doubts)
        group = self._groups.setdefault(int(counts[-1]).bit_length(), _Group(size))
        group.add([count / seconds for count in counts])
        self._costs = None

    def _solve(self) -> tuple[float, ...]:
        """The best costs that are not negative: the best of each choice of which are not zero."""
        size = len(self._doubts)
        square = [[0.0] * size for _ in range(size)]
        right = [0.0] * size
        for group in self._groups.values():
            for i in range(size):
                right[i] += group.sums[i] / group.weight
                for j in range(size):
                    square[i][j] += group.products[i][j] / group.weight
        for i, doubt in enumerate(self._doubts):
            square[i][i] *= 1.0 + doubt
        best_gain, best = 0.0, [0.0] * size
        for count in range(size, 0, -1):
            for choice in combinations(range(size), count):
                costs = _least_squares(square, right, choice)
                # What is left of the error is a constant less this.
                gain = sum(cost * right[i] for i, cost in enumerate(costs))
                if min(costs) >= 0.0 and gain > best_gain:
                    best_gain, best = gain, costs
        return tuple(best)


class _Group:
    """Sums over the pieces of one group, older ones weighing less."""

    __slots__ = ("products", "sums", "weight")

    def __init__(self, size: int) -> None:
        self.weight = 0.0
        self.sums = [0.0] * size
        self.products = [[0.0] * size for _ in range(size)]

    def add(self, parts: Sequence[float]) -> None:
        """Takes a piece: its counts over the seconds it took."""
        self.weight = KEPT_SHARE * self.weight + 1.0
        for i, part in enumerate(parts):
            self.sums[i] = KEPT_SHARE * self.sums[i] + part
            row = self.products[i]
            for j, other in enumerate(parts):
                row[j] = KEPT_SHARE * row[j] + part * other


def _least_squares(
    square: list[list[float]], right: list[float], choice: tuple[int, ...]
) -> list[float]:
    """Solves the normal equations of the chosen costs; the others are zero."""
    rows = [[*(square[i][j] for j in choice), right[i]] for i in choice]
    size = len(choice)
    for k in range(size):
        # The matrix is positive definite, by the doubts: no exchange of rows is needed.
        for i in range(size):
            if i != k:
                factor = rows[i][k] / rows[k][k]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[k], strict=True)]
    costs = [0.0] * len(right)
    for place, i in enumerate(choice):
        costs[i] = rows[place][size] / rows[place][place]
    return costs
