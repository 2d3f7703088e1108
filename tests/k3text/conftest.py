import pytest

from k3text.tokenizer import Tokenizer
from k3text.vocabulary import learn_ranks


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """640 tokens, 256 of them special: words fall apart, so every border is met."""
    return Tokenizer(learn_ranks(384))
