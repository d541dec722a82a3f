"""Publish a track and watch it: MOQT alone, over QUIC on this machine.

Run it from a checkout, after `make install`: .venv/bin/python -m examples.watch_a_track

The track has two Objects when the client comes: a fill brings these, the subscription what is
published from then on, until the track ends.
"""

import asyncio
import tempfile

import moqt
from moqt.quic.certificates import make_self_signed

NAME = moqt.FullTrackName((b"demo", b"live"), b"video")


async def show(track: moqt.TrackStore) -> None:
    for number in range(2, 5):
        await asyncio.sleep(0.02)
        track.append(0, number, f"frame {number}".encode())
    track.mark_end(moqt.Location(0, 5), moqt.ObjectStatus.END_OF_TRACK)
    track.finish(moqt.PublishDoneCode.TRACK_ENDED)


async def watch(session: moqt.MoqtSession, track: moqt.TrackStore) -> None:
    subscription = await session.subscribe(
        NAME.namespace,
        NAME.name,
        location_filter=moqt.LocationFilter.next_object(),
        fill=moqt.LocationFilter.absolute_start(0, 0),
    )
    showing = asyncio.create_task(show(track))
    async for received in subscription:
        what = bytes(received.payload).decode() or received.status.name
        print(tuple(received.location), what, "by", received.via.name)
    await showing


async def main() -> None:
    track = moqt.TrackStore(NAME)
    track.append(0, 0, b"frame 0")
    track.append(0, 1, b"frame 1")
    publisher = moqt.Publisher()
    publisher.add_track(track)
    with tempfile.TemporaryDirectory() as folder:
        cert, key = make_self_signed(folder)
        quic = moqt.QuicConfig(certfile=cert, keyfile=key)
        async with (
            moqt.serve("127.0.0.1", 0, quic=quic, handler=publisher) as server,
            moqt.connect(f"moqt://127.0.0.1:{server.port}", cafile=cert) as session,
        ):
            await watch(session, track)


if __name__ == "__main__":
    asyncio.run(main())
