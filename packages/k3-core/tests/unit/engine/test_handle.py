"""The event stream: who waits in an event loop is woken, and no more often than needed."""

import asyncio
import threading
import time
from collections.abc import Callable
from unittest.mock import Mock

from k3_core.engine.handle import HOLD, LONGEST_HOLD, EventStream, waking_at_end
from k3_core.engine.protocol import Event

LAST = Event(1, -0.5, (), 0, "length")


def event(token_id: int) -> Event:
    return Event(token_id, -0.5, (), 0)


async def taken(stream: EventStream) -> list[int | None]:
    return [event.token_id async for event in stream]


def test_the_events_of_a_step_wake_the_loop_once() -> None:
    streams = [EventStream(str(i), 1) for i in range(5)]
    calls: list[object] = []

    async def main() -> list[list[int | None]]:
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *a: (calls.append(a), call(*a))[1]  # type: ignore
        readers = [asyncio.create_task(taken(stream)) for stream in streams]
        for step in range(3):
            await asyncio.sleep(0.01)  # all of them wait by then
            for stream in streams:
                stream.put(event(step) if step < 2 else LAST)
        return await asyncio.gather(*readers)

    assert asyncio.run(main()) == [[0, 1, 1]] * 5
    assert len(calls) == 3


def test_a_thread_wakes_the_loop_when_its_events_are_all_there() -> None:
    """Each event waits for the loop's thread to have had every chance to run."""
    streams = [EventStream(str(i), 1) for i in range(3)]
    calls: list[int] = []

    def step() -> None:
        with waking_at_end():
            for stream in streams:
                stream.put(LAST)
                time.sleep(0.02)
                assert not calls

    async def main() -> list[list[int | None]]:
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe
        readers = [asyncio.create_task(taken(stream)) for stream in streams]
        await asyncio.sleep(0.01)
        loop.call_soon_threadsafe = lambda *a: (calls.append(1), call(*a))[1]  # type: ignore
        thread = threading.Thread(target=step)
        thread.start()
        async with asyncio.timeout(30):
            found = await asyncio.gather(*readers)
        thread.join()
        return found

    assert asyncio.run(main()) == [[1]] * 3
    assert len(calls) == 1


def test_no_event_is_lost_between_a_thread_and_the_loop() -> None:
    count, streams = 2000, [EventStream(str(i), 1) for i in range(4)]

    def step() -> None:
        for token_id in range(count):
            for stream in streams:
                stream.put(event(token_id))
        for stream in streams:
            stream.put(LAST)

    async def main() -> list[list[int | None]]:
        readers = [asyncio.create_task(taken(stream)) for stream in streams]
        thread = threading.Thread(target=step)
        thread.start()
        async with asyncio.timeout(30):
            found = await asyncio.gather(*readers)
        thread.join()
        return found

    assert asyncio.run(main()) == [[*range(count), 1]] * 4


def test_a_reader_that_gave_up_and_a_loop_that_ended_hold_up_nobody() -> None:
    gone, other = EventStream("a", 1), EventStream("b", 1)

    async def give_up() -> None:
        first, second = (asyncio.create_task(taken(stream)) for stream in (gone, other))
        await asyncio.sleep(0)
        first.cancel()
        gone.put(event(0))
        other.put(LAST)
        assert await second == [1]

    async def leave() -> None:
        task = asyncio.create_task(taken(gone))
        await asyncio.sleep(0)
        assert not task.done()  # it took event 0 and waits for the next

    asyncio.run(give_up())
    asyncio.run(leave())
    gone.put(LAST)  # nobody is there any more
    assert [found.token_id for found in gone] == [1]


class Loop:
    """Streams whose consumers wait in a loop with timers that ring when they are told to."""

    def __init__(self, count: int) -> None:
        self.streams = [EventStream(str(i), 1) for i in range(count)]
        self.taken: list[list[list[int | None]]] = [[] for _ in self.streams]
        self.timers: list[tuple[float, Callable[[], None]]] = []

    async def begin(self) -> None:
        loop = asyncio.get_running_loop()
        later = Mock(side_effect=lambda *timer: (self.timers.append(timer), Mock())[1])
        loop.call_later = later  # type: ignore[method-assign]
        self.readers = [asyncio.create_task(self._read(i)) for i in range(len(self.streams))]
        await self.pause()

    async def _read(self, index: int) -> None:
        while events := await self.streams[index].take():
            self.taken[index].append([event.token_id for event in events])

    async def pause(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def step(self, event: Event, count: int | None = None) -> None:
        with waking_at_end():
            for stream in self.streams[:count]:
                stream.put(event)
        await self.pause()


def test_of_many_streams_tokens_go_out_together_but_the_first_and_the_last_at_once() -> None:
    async def main() -> None:
        loop = Loop(4)
        await loop.begin()
        await loop.step(event(10))
        assert loop.taken == [[[10]]] * 4
        await loop.step(event(11))
        await loop.step(event(12))
        assert loop.taken == [[[10]]] * 4
        ((seconds, ring),) = loop.timers
        assert seconds == 4 * HOLD
        ring()
        await loop.pause()
        assert loop.taken == [[[10], [11, 12]]] * 4
        await loop.step(event(13))
        await loop.step(LAST, 1)  # what waits beside it comes too
        assert loop.taken == [[[10], [11, 12], [13, 1]], *[[[10], [11, 12], [13]]] * 3]
        await loop.step(LAST)
        await asyncio.gather(*loop.readers)

    asyncio.run(main())


def test_no_token_of_a_single_stream_waits() -> None:
    async def main() -> None:
        loop = Loop(1)
        await loop.begin()
        for token_id in (10, 11, 12):
            await loop.step(event(token_id))
        assert loop.taken == [[[10], [11], [12]]]
        assert not loop.timers
        await loop.step(LAST)
        await asyncio.gather(*loop.readers)

    asyncio.run(main())


def test_a_hold_of_many_streams_ends_soon_enough_to_read_on() -> None:
    async def main() -> None:
        loop = Loop(100)
        await loop.begin()
        await loop.step(event(10))
        assert [seconds for seconds, _ in loop.timers] == [LONGEST_HOLD]
        await loop.step(LAST)
        await asyncio.gather(*loop.readers)

    asyncio.run(main())
