"""The seam between drafts: everything above it speaks values, everything below it octets.

The draft of a session is what ALPN selected; `codec_for` finds its codec and
the session keeps it. The table of codecs is the process's, the draft in use is not:
sessions of several drafts run side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from moqt.values.codes import GroupOrder, MessageType, ObjectStatus
from moqt.values.errors import MisuseError
from moqt.values.messages import AuthorizationToken, Message, Parameters, Request, RequestOk
from moqt.wire.draft22 import Draft22Codec
from moqt.wire.objects import (
    DEFAULT_MAX_PROPERTIES,
    DatagramObject,
    FetchEvent,
    GroupOrderOf,
    ObjectHeader,
    PaddingDatagram,
    RangeMarker,
    StreamKind,
    SubgroupEvent,
    SubgroupHeader,
)


class MessageDecoder(Protocol):
    @property
    def buffered(self) -> int:
        """Octets held of an incomplete message; 0 where a FIN cuts none."""

    def feed(self, data: bytes) -> list[Message]:
        """The messages that end in `data`. Raises SessionError as early as the octets allow."""


class SubgroupDecoder(Protocol):
    """Events: one SubgroupHeader, then per Object a WholeObject when all of it is in what is fed
    at once (or it has no payload), else its ObjectHeader and its payload in parts."""

    max_properties: int

    @property
    def pending(self) -> bytearray:
        """What is held of an incomplete header, at most `max_properties` and a few dozen."""

    @property
    def mid_object(self) -> bool:
        """Whether a FIN here would cut the stream's header or an Object."""

    def feed(self, data: bytes) -> list[SubgroupEvent]:
        """What `data` brings. Payloads are `data` itself or views into it, not copies."""


class FetchDecoder(Protocol):
    """Events: one FetchHeader, then Objects as on a subgroup stream, or RangeMarkers."""

    max_properties: int
    group_order: GroupOrderOf

    @property
    def pending(self) -> bytearray:
        """What is held of an incomplete header, at most `max_properties` and a few dozen."""

    @property
    def mid_object(self) -> bool:
        """As for a subgroup."""

    def feed(self, data: bytes) -> list[FetchEvent]:
        """As for a subgroup."""


class FetchEncoder(Protocol):
    def header(self) -> bytes: ...

    def object(self, header: ObjectHeader) -> bytes:
        """The octets before the payload, which is sent after them by reference."""

    def marker(self, marker: RangeMarker) -> bytes: ...


class Codec(Protocol):
    """One draft's octets. Decoding raises SessionError, encoding MisuseError."""

    @property
    def alpn(self) -> str: ...

    def encode_message(self, message: Message) -> bytes: ...

    def message_decoder(self, first: frozenset[MessageType] | None = None) -> MessageDecoder:
        """`first`: the types the stream may begin with; others are refused at their type.

        Parameters of REQUEST_UPDATE and REQUEST_OK are checked as far as they can be
        without the request; the two checks below do the rest. Values of range
        filters are not judged here but by `moqt.track.filters.check_range_filters`.
        """

    def check_request_update(
        self, update: Parameters, request: type[Request] | MessageType
    ) -> None:
        """Raises SessionError for parameters an update of this kind of request may not carry."""

    def check_request_ok(self, message: RequestOk, request: type[Request] | MessageType) -> None:
        """Raises SessionError when this cannot answer that kind of request or REQUEST_UPDATE."""

    def data_stream_type(self, buffer: bytes) -> tuple[StreamKind, int] | None:
        """What a unidirectional stream is, from its first octets, and how many its type takes.

        None: more octets are needed. The stream's decoder is fed all octets, type included.
        """

    def subgroup_decoder(self, max_properties: int = DEFAULT_MAX_PROPERTIES) -> SubgroupDecoder: ...

    def fetch_decoder(
        self, group_order: GroupOrderOf, max_properties: int = DEFAULT_MAX_PROPERTIES
    ) -> FetchDecoder:
        """`group_order` as asked for, or a function that knows it by Request ID."""

    def encode_subgroup_header(
        self, header: SubgroupHeader, *, properties: bool, explicit: bool = False
    ) -> bytes: ...

    def encode_subgroup_object(
        self,
        previous_id: int | None,
        object_id: int,
        *,
        properties: bytes = b"",
        with_properties: bool,
        length: int,
        status: ObjectStatus = ObjectStatus.NORMAL,
    ) -> bytes: ...

    def fetch_encoder(self, request_id: int, group_order: GroupOrder) -> FetchEncoder: ...

    def encode_datagram(
        self, datagram: DatagramObject | PaddingDatagram, *, explicit_status: bool = False
    ) -> bytes: ...

    def decode_datagram(self, data: bytes) -> DatagramObject | PaddingDatagram: ...

    def encode_padding_header(self) -> bytes:
        """What a padding stream begins with; any number of zero octets follow."""

    def encode_token(self, token: AuthorizationToken) -> bytes: ...

    def decode_token(self, data: bytes) -> AuthorizationToken: ...


_registered: dict[str, Codec] = {}
"""The drafts spoken here. Which one a session speaks is its own matter: see `codec_for`."""


def register_codec(codec: Codec) -> None:
    """Make the draft of `codec` known; sessions whose ALPN names it take it from now on.

    What is offered in ALPN is a matter of `QuicConfig.alpn`, not of this table. Raises
    MisuseError when another codec has the name already.
    """
    if _registered.setdefault(codec.alpn, codec) is not codec:
        raise MisuseError(f"there is a codec for MOQT draft {codec.alpn!r} already")


def unregister_codec(alpn: str) -> None:
    """No new session takes this codec; those that have it keep it. Raises MisuseError."""
    codec_for(alpn)
    del _registered[alpn]


def codecs() -> Mapping[str, Codec]:
    """The registered codecs by ALPN, in the order of their registration."""
    return MappingProxyType(_registered)


def codec_for(alpn: str) -> Codec:
    """The codec of the draft that `alpn` names. Raises MisuseError for a draft not spoken here."""
    try:
        return _registered[alpn]
    except KeyError:
        known = ", ".join(_registered)
        raise MisuseError(f"no MOQT draft {alpn!r} here; known: {known}") from None


register_codec(Draft22Codec())
