"""Pages of a hand-off from a prefill to a decode worker: lists of them, never their contents."""

from k3wire.messages.base import Message


class PageLayoutInfo(Message, frozen=True, kw_only=True, tag="page-layout"):
    """What two workers must agree on before a byte moves; any difference refuses with both values.

    Attributes:
        model_fingerprint: checkpoint and dtype.
        layout_version: version of the arrangement inside a page.
        partition: tensor-parallel partition, e.g. `tp0of1`.
        page_bytes: length of a page.
        page_units: units of latent rows in a page.
        unit_tokens: tokens of a unit.
        num_state_groups: pages that hold one full KDA state.
    """

    model_fingerprint: str
    layout_version: int
    partition: str
    page_bytes: int
    page_units: int
    unit_tokens: int
    num_state_groups: int


class PageGrant(Message, frozen=True, kw_only=True, tag="page-grant"):
    """Pages that a decode worker reserved for one request, as destinations.

    Page i lies at base_address + page id · page_bytes of the session. Rows are granted by unit,
    since a prefix may end inside a page; unit u is place u % page_units of page u // page_units,
    and units that neighbour each other on both sides travel as one span.

    Attributes:
        session: transfer-engine session.
        base_address: first byte of the arena.
        latent_units: int32 little-endian unit ids, for the latent rows from
            `num_resident_tokens` on, in order.
        state_pages: int32 little-endian page ids, one for each KDA group.
        num_resident_tokens: leading tokens whose latent rows the decode worker already has, whole
            units; they are not sent and must not be written.
    """

    session: str
    base_address: int
    latent_units: bytes
    state_pages: bytes
    num_resident_tokens: int = 0
