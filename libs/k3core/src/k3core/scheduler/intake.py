"""Requests at the door: are they possible, what are they called, what do they count."""

from k3core.cache.coordinator import PrefixCache
from k3core.cache.match import Match
from k3core.cache.sequence import Sequence
from k3core.scheduler.embeddings import EmbeddingCache
from k3core.scheduler.plan import Usage
from k3core.scheduler.request import Request


def name_request(cache: PrefixCache, request: Request) -> Sequence:
    """The cache's view of a request: hashed, holding nothing yet."""
    return cache.new_sequence(
        request.request_id,
        request.tokens,
        ((image.offset, image.count, image.key) for image in request.images),
        request.salt,
        request.adapter,
        request.markers,
        request.unit_digests,
    )


def refusal(cache: PrefixCache, embeddings: EmbeddingCache | None, request: Request) -> str:
    """Why a request can never run, "" if it can."""
    n = len(request.tokens)
    if not n:
        return "the prompt is empty"
    if not cache.can_ever_fit(n):
        return f"the prompt of {n} tokens is larger than the cache"
    most = cache.config.draft_tokens
    if most and request.draft_tokens > most:
        return f"{request.draft_tokens} drafts a step are more than the {most} of this cache"
    if len({(image.key, image.count) for image in request.images}) > len(
        {image.key for image in request.images}
    ):
        return "one picture has two sizes"
    for image in request.images:
        if image.offset + image.count > n:
            return f"the picture at {image.offset} does not end inside the prompt"
        if embeddings is not None and image.count > embeddings.capacity:
            return f"the picture's {image.count} tokens are more than the buffer holds"
    return ""


def usage_of(match: Match, is_remote: bool = False) -> Usage:
    """What a first admission counts."""
    return Usage(
        prompt_tokens=match.num_tokens,
        cached_local=match.local_hit if is_remote else match.hit,
        cached_remote=match.hit - match.local_hit if is_remote else 0,
        computed=match.num_tokens - match.hit,
        checkpoint=match.hit,
        matched=match.matched,
        reuse_gap=match.gap,
        gap_reason=match.reason,
    )
