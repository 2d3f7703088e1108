"""From a chat request's body to a running generation, in the order that wastes least.

parse → limits → images' headers, all at once → token count → context check → render → dispatch.
A request that is refused has paid for nothing deeper than an image's header.
"""

import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import msgspec

from k3_gateway.answer import Answer
from k3_gateway.chat_request import bodies
from k3_gateway.chat_request.messages import ImageInput, parse_messages
from k3_gateway.chat_request.params import ChatOptions, parse_options
from k3_gateway.chat_request.tools import parse_render_options, parse_tools
from k3_gateway.generation import Fleet, Generation, Order, complete_sampling
from k3_gateway.images import ImageResolver
from k3_gateway.turns import Turns
from k3text.chat_format.conversation import Conversation, ImageSize, RenderOptions
from k3text.chat_format.prompt import RenderedPrompt, render_prompt_ids
from k3text.parsers.output_parser import OutputParser
from k3text.tokenizer import Tokenizer
from k3wire.errors import ContextLengthExceeded, ModelNotFound
from k3wire.messages.base import StageReport
from k3wire.messages.media import ImageSlot
from k3wire.messages.prompt import PromptPayload

DEFAULT_MAX_TOKENS = 131072
"""Output tokens of a request that names no limit, if they fit."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the gateway serves.

    Attributes:
        name: what clients ask for.
        fingerprint: shown as `system_fingerprint`.
        max_context_tokens: of prompt and answer together.
        tokenizer: of the checkpoint.
        created_s: Unix time shown in the model list.
    """

    name: str
    fingerprint: str
    max_context_tokens: int
    tokenizer: Tokenizer
    created_s: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that may be dispatched.

    Attributes:
        request_id: of ours.
        options: as asked for.
        prompt: rendered.
        order: for the generation.
        max_calls: that may be shown; None for any number.
        reports: of the stages so far.
        fingerprint: of the model.
        created_s: Unix time of the answer.
    """

    request_id: str
    options: ChatOptions
    prompt: RenderedPrompt
    order: Order
    max_calls: int | None
    reports: tuple[StageReport, ...]
    fingerprint: str
    created_s: int


@dataclass(frozen=True, slots=True)
class _Parsed:
    options: ChatOptions
    conversation: Conversation
    render_options: RenderOptions


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Prepares and starts generations.

    Attributes:
        model: what is served.
        fleet: the workers.
        images: resolves image parts.
        worker_id: of this gateway, for its report.
        max_images: in one request.
        request_timeout_s: of one request.
        has_tenant_caches: whether tenants' caches are kept apart.
        turns: where bodies are decoded and rendered.
    """

    model: ServedModel
    fleet: Fleet
    images: ImageResolver
    worker_id: str
    max_images: int
    request_timeout_s: float
    has_tenant_caches: bool
    turns: Turns = field(default_factory=Turns)

    @contextlib.asynccontextmanager
    async def prepare(
        self, body: bytearray, tenant: str, request_id: str, arrival_unix_ns: int
    ) -> AsyncGenerator[Prepared, None]:
        """Makes a request ready; what it holds of images is released at the end.

        Args:
            body: whole; emptied as soon as it is decoded.
            tenant: whose.
            request_id: of ours.
            arrival_unix_ns: when it came.

        Raises:
            K3Error: the request is at fault, or its images are.
        """
        deadline_unix_ns = arrival_unix_ns + int(self.request_timeout_s * 1e9)
        size_bytes = len(body)
        parsed, images = await self.turns.run(size_bytes, lambda: self._parse(body))
        body.clear()
        text_bytes = size_bytes - sum(len(image.url) for image in images)
        scope = tenant if self.has_tenant_caches else ""
        async with self.images.resolve(images, request_id, scope, deadline_unix_ns) as resolved:
            # Their URLs may be most of the body, and a generation takes long.
            images.clear()
            sizes = resolved.sizes
            self._check_images_fit(sizes)
            rendered = await self.turns.run(text_bytes, lambda: self._render(parsed, sizes))
            payload = PromptPayload(
                token_ids=rendered.token_ids,
                image_slots=_slots(rendered, resolved.slots),
                mark_offsets=rendered.mark_offsets,
            )
            order = Order(
                request_id=request_id,
                prompt=payload,
                sampling=complete_sampling(
                    parsed.options.sampling,
                    self._max_tokens(parsed.options, rendered.num_tokens),
                    (self.model.tokenizer.specials.end_of_msg,),
                ),
                cache_salt=f"{scope}\0{parsed.options.cache_salt}"
                if scope
                else (parsed.options.cache_salt),
                arrival_unix_ns=arrival_unix_ns,
                deadline_unix_ns=deadline_unix_ns,
            )
            own = self._report(order, resolved.waited_ns, size_bytes)
            yield Prepared(
                request_id=request_id,
                options=parsed.options,
                prompt=rendered,
                order=order,
                max_calls=_max_calls(parsed),
                reports=(own, *resolved.reports),
                fingerprint=self.model.fingerprint,
                created_s=arrival_unix_ns // 10**9,
            )

    def _report(self, order: Order, waited_ns: int, size_bytes: int) -> StageReport:
        return StageReport(
            stage="gateway",
            outcome="miss",
            worker_id=self.worker_id,
            start_unix_ns=order.arrival_unix_ns,
            duration_ns=max(0, time.time_ns() - order.arrival_unix_ns - waited_ns),
            num_items=order.num_prompt_tokens,
            size_bytes=size_bytes,
        )

    def start(self, prepared: Prepared) -> Generation:
        """Makes the generation of a prepared request; entering it begins."""
        parser = OutputParser(
            self.model.tokenizer,
            prepared.prompt.start_channel,
            ignore_end=prepared.order.sampling.ignores_end,
        )
        answer = Answer(parser, prepared.options.stops, max_calls=prepared.max_calls)
        answer.reports.extend(prepared.reports)
        return Generation(fleet=self.fleet, order=prepared.order, answer=answer)

    def _parse(self, body: bytearray) -> tuple[_Parsed, list[ImageInput]]:
        fields = bodies.decode_object(body, self.images.max_url_bytes)
        options = parse_options(fields)
        if options.model != self.model.name:
            raise ModelNotFound(
                f"The model {options.model[:80]!r} is not served here; ask for {self.model.name!r}",
                param="model",
            )
        parsed = parse_messages(fields, self.max_images)
        bodies.check_text(len(body), sum(len(image.url) for image in parsed.images))
        tools = parse_tools(fields.get("tools"), "tools")
        has_dynamic = any(getattr(message, "tools", ()) for message in parsed.messages)
        found = _Parsed(
            options=options,
            conversation=Conversation(messages=parsed.messages, tools=tools),
            render_options=parse_render_options(fields, bool(tools) or has_dynamic),
        )
        return found, list(parsed.images)

    def _check_images_fit(self, sizes: tuple[ImageSize, ...]) -> None:
        pads = sum(size.num_tokens for size in sizes)
        if pads >= self.model.max_context_tokens:
            raise self._too_long(pads)

    def _render(self, parsed: _Parsed, sizes: tuple[ImageSize, ...]) -> RenderedPrompt:
        return render_prompt_ids(
            parsed.conversation, parsed.render_options, sizes, self.model.tokenizer
        )

    def _too_long(self, num_tokens: int) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"This model's maximum context length is {self.model.max_context_tokens} tokens; "
            f"the request needs {num_tokens}. Shorten the messages or ask for fewer tokens",
            param="messages",
        )

    def _max_tokens(self, options: ChatOptions, num_prompt: int) -> int:
        room = self.model.max_context_tokens - num_prompt
        wanted = options.max_tokens
        if room < 1:
            raise self._too_long(num_prompt + 1)
        if wanted is not None and wanted > room:
            raise self._too_long(num_prompt + wanted)
        return wanted if wanted is not None else min(DEFAULT_MAX_TOKENS, room)


def _max_calls(parsed: _Parsed) -> int | None:
    if parsed.render_options.tool_choice == "none":
        return 0
    return None if parsed.options.has_parallel_calls else 1


def _slots(rendered: RenderedPrompt, slots: tuple[ImageSlot, ...]) -> tuple[ImageSlot, ...]:
    return tuple(
        msgspec.structs.replace(slots[span.image_index], offset=span.offset)
        for span in rendered.image_spans
    )
