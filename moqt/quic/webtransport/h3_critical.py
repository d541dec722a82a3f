"""The peer's control and QPACK streams (RFC 9114 section 6.2): one of each, open to the end."""

from __future__ import annotations

from moqt.quic.webtransport.h3 import (
    RESERVED_FRAMES,
    FrameType,
    H3Code,
    H3Error,
    HeaderCodec,
    StreamType,
    TypeLengthReader,
    decode_goaway,
    decode_settings,
)

CRITICAL = frozenset({StreamType.CONTROL, StreamType.QPACK_ENCODER, StreamType.QPACK_DECODER})


class CriticalStreams:
    """What the peer said on them: its `settings`, and that it is going away."""

    def __init__(self, qpack: HeaderCodec, *, is_client: bool) -> None:
        self.settings: dict[int, int] | None = None
        self.going_away = False
        self.reader = TypeLengthReader({*FrameType, *RESERVED_FRAMES} - {FrameType.WT_STREAM})
        self._qpack, self._is_client = qpack, is_client
        self._roles: dict[int, StreamType] = {}
        self._last_goaway: int | None = None

    def __contains__(self, stream_id: object) -> bool:
        return stream_id in self._roles

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self._roles)

    def begin(self, stream_id: int, kind: int, data: bytes, fin: bool) -> None:
        """A stream of a `CRITICAL` type has been opened. Raises H3Error, as `feed` does."""
        role = StreamType(kind)
        if role in self._roles.values():
            raise H3Error(H3Code.STREAM_CREATION_ERROR, f"a second {role.name} stream")
        self._roles[stream_id] = role
        self.feed(stream_id, data, fin)

    def feed(self, stream_id: int, data: bytes, fin: bool) -> None:
        role = self._roles[stream_id]
        if fin:
            raise H3Error(H3Code.CLOSED_CRITICAL_STREAM, f"the {role.name} stream ended")
        if role is StreamType.QPACK_ENCODER:
            self._qpack.encoder_stream(data)
        elif role is StreamType.QPACK_DECODER:
            self._qpack.decoder_stream(data)
        else:
            self._control(data)

    def _control(self, data: bytes) -> None:
        for kind, payload in self.reader.feed(data):
            if kind == FrameType.SETTINGS and self.settings is None:
                self.settings = decode_settings(payload)
            elif self.settings is None:
                raise H3Error(H3Code.MISSING_SETTINGS, "the first frame is not SETTINGS")
            elif kind != FrameType.GOAWAY:
                raise H3Error(H3Code.FRAME_UNEXPECTED, f"frame {kind:#x} on the control stream")
            else:
                self._goaway(decode_goaway(payload))

    def _goaway(self, last: int) -> None:
        """RFC 9114 section 5.2: a server names a request, and nobody takes an id back."""
        if (self._is_client and last & 3) or (
            self._last_goaway is not None and last > self._last_goaway
        ):
            raise H3Error(H3Code.ID_ERROR, f"a GOAWAY names {last}")
        self._last_goaway = last
        self.going_away = True
