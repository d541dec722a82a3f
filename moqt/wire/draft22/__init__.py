"""MOQT draft-22 on the wire, as one `Codec`: messages, parameters, data streams, datagrams.

May import `moqt.values` and what drafts share in `moqt.wire` (vi64, primitives, incremental,
objects).
"""

from __future__ import annotations

from moqt.values.codes import MessageType
from moqt.values.errors import protocol_violation
from moqt.values.messages import Parameters, Request, RequestOk
from moqt.wire.draft22 import datagrams, messages, parameters, streams
from moqt.wire.objects import DEFAULT_MAX_PROPERTIES, GroupOrderOf
from moqt.wire.primitives import decode_token, encode_token


def _type_of(request: type[Request] | MessageType) -> MessageType:
    return request if isinstance(request, MessageType) else request.TYPE


class Draft22Codec:
    """Stateless; one is enough for any number of sessions."""

    alpn = "moqt-22"

    encode_message = staticmethod(messages.encode_message)
    data_stream_type = staticmethod(streams.data_stream_type)
    encode_subgroup_header = staticmethod(streams.encode_subgroup_header)
    encode_subgroup_object = staticmethod(streams.encode_subgroup_object)
    fetch_encoder = staticmethod(streams.FetchEncoder)
    encode_datagram = staticmethod(datagrams.encode_datagram)
    decode_datagram = staticmethod(datagrams.decode_datagram)
    encode_padding_header = staticmethod(streams.encode_padding_header)
    encode_token = staticmethod(encode_token)
    decode_token = staticmethod(decode_token)

    def message_decoder(
        self, first: frozenset[MessageType] | None = None
    ) -> messages.MessageDecoder:
        return messages.MessageDecoder(first)

    def subgroup_decoder(
        self, max_properties: int = DEFAULT_MAX_PROPERTIES
    ) -> streams.SubgroupDecoder:
        return streams.SubgroupDecoder(max_properties)

    def fetch_decoder(
        self, group_order: GroupOrderOf, max_properties: int = DEFAULT_MAX_PROPERTIES
    ) -> streams.FetchDecoder:
        return streams.FetchDecoder(group_order, max_properties)

    def check_request_update(
        self, update: Parameters, request: type[Request] | MessageType
    ) -> None:
        parameters.check_in_update(update, _type_of(request))

    def check_request_ok(self, message: RequestOk, request: type[Request] | MessageType) -> None:
        type_ = _type_of(request)
        parameters.check_in_ok(message.parameters, type_)
        if message.properties and type_ is not MessageType.TRACK_STATUS:
            raise protocol_violation(f"Track Properties in answer to {type_.name}")
