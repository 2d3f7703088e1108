import asyncio

from k3core.engine.frames import MAX_BACKLOG, FrameAssembler, FrameSender
from k3wire.messages.stream import TokenDelta, TokenFrame


def delta(request_id: str, *tokens: int) -> TokenDelta:
    return TokenDelta(request_id=request_id, token_ids=tokens)


def test_a_step_makes_one_frame_for_each_gateway_in_order() -> None:
    assembler = FrameAssembler("decode-1", 7)
    frames = assembler.assemble(
        [("gw.a", delta("r1", 1)), ("gw.b", delta("r2", 2)), ("gw.a", delta("r3", 3))]
    )
    assert frames == [
        (
            "gw.a",
            TokenFrame(
                worker_id="decode-1", epoch=7, seq=0, deltas=(delta("r1", 1), delta("r3", 3))
            ),
        ),
        ("gw.b", TokenFrame(worker_id="decode-1", epoch=7, seq=0, deltas=(delta("r2", 2),))),
    ]


def test_numbers_rise_by_one_for_each_gateway_by_itself() -> None:
    assembler = FrameAssembler("w", 1)
    seqs = [
        (subject, frame.seq)
        for subjects in (["a"], ["a", "b"], ["b"], ["a"])
        for subject, frame in assembler.assemble([(s, delta("r")) for s in subjects])
    ]
    assert seqs == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("a", 2)]


def test_two_deltas_of_one_request_never_share_a_frame() -> None:
    frames = FrameAssembler("w", 1).assemble(
        [("a", delta("r", 1)), ("a", delta("other", 9)), ("a", delta("r", 2))]
    )
    assert [[d.token_ids for d in frame.deltas] for _, frame in frames] == [[(1,), (9,)], [(2,)]]
    assert [frame.seq for _, frame in frames] == [0, 1]


def test_frames_are_published_in_order_and_waited_for() -> None:
    published: list[int] = []

    async def publish(subject: str, frame: TokenFrame) -> None:
        await asyncio.sleep(0)
        published.append(frame.seq)

    async def run() -> None:
        sender = FrameSender(FrameAssembler("w", 1), publish)
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            task = group.create_task(sender.run())
            for _ in range(20):
                sender.add("a", delta("r"))
                sender.flush()
            await sender.wait_sent()
            assert published == list(range(20))
            sender.flush()
            await sender.wait_sent()
            task.cancel()

    asyncio.run(run())


def test_a_bus_that_takes_nothing_costs_the_oldest_frames_not_the_worker() -> None:
    async def publish(subject: str, frame: TokenFrame) -> None:
        raise AssertionError("never run")

    async def run() -> None:
        sender = FrameSender(FrameAssembler("w", 1), publish)
        for _ in range(MAX_BACKLOG + 3):
            sender.add("a", delta("r"))
            sender.flush()
        assert sender.num_dropped == 3

    asyncio.run(run())
