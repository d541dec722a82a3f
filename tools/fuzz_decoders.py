"""The decoders as targets of `tools.fuzz`, one class each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from kvcs.names.codes import Component
from kvcs.names.errors import KvcsError
from kvcs.names.manifest import Manifest
from kvcs.names.namespace import PublicationNamespace, parse_publication_uri
from kvcs.names.payload import check_payload
from kvcs.trust import cose
from kvcs.trust.sealing import TrackOpener, TrackSealer
from kvsp.blocks.codecs import decode_section, encode_section
from kvsp.names.codes import Codec, DecodeErrorName
from kvsp.names.content_keys import ContentKey
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor
from moqt.log.describe import describe, line
from moqt.track.filters import check_range_filters
from moqt.uri import parse_uri
from moqt.values.codes import REQUEST_OPENERS, GroupOrder, MessageType, SessionErrorCode
from moqt.values.errors import MisuseError, RequestError, SessionError
from moqt.values.messages import Parameters
from moqt.values.names import FullTrackName
from moqt.wire.objects import PaddingDatagram, WholeObject
from tools.fuzz_base import CODEC, KVCS, Case, Target, vectors
from tools.fuzz_budget import Budget


def _parts(case: Case) -> list[bytes]:
    return [octets for _, octets in case]


class Control(Target):
    """Control messages in any parts; what decodes must encode, and print, again."""

    name = "control"

    def corpus(self) -> list[Case]:
        return [[("", octets)] for octets in vectors("control", "token", "stream_prefix")]

    def run(self, case: Case) -> None:
        first: frozenset[MessageType] | None
        for first in (None, REQUEST_OPENERS, frozenset({MessageType.SETUP})):
            decoder = CODEC.message_decoder(first)
            fed = 0
            try:
                for part in _parts(case):
                    fed += len(part)
                    for message in decoder.feed(part):
                        if self._valid(getattr(message, "parameters", Parameters())):
                            encoded = CODEC.encode_message(message)
                            assert CODEC.message_decoder().feed(encoded) == [message]
                        json.dumps(describe(message))
                        assert line(message).isprintable()
                    assert decoder.buffered <= min(fed, 70_000)
            except SessionError as error:
                assert error.reason
        try:
            token = CODEC.decode_token(b"".join(_parts(case)))
        except SessionError:
            return
        assert CODEC.decode_token(CODEC.encode_token(token)) == token

    @staticmethod
    def _valid(parameters: Parameters) -> bool:
        """Whether the range filters can be encoded: decoding does not judge their values."""
        fill = parameters.fill_parameters or Parameters()
        try:
            check_range_filters(parameters.range_filters, 1000)
            check_range_filters(fill.range_filters, 1000)
        except RequestError:
            return False
        return True


class Data(Target):
    """Subgroup and fetch streams: any split brings the same Objects and payloads."""

    name = "data"
    budget = Budget(calls_per_octet=100)  # each is read six times, half of these octet by octet

    def corpus(self) -> list[Case]:
        return [[("", octets)] for octets in vectors("subgroup_stream", "fetch_stream")]

    @staticmethod
    def _read(decoder: Any, parts: Iterable[bytes]) -> tuple[list[Any], str | None]:
        events: list[Any] = []
        try:
            for part in parts:
                for event in decoder.feed(part):
                    if isinstance(event, WholeObject):
                        events.append(event.header)
                        if event.payload:
                            events.append(bytes(event.payload))
                    elif isinstance(event, bytes | memoryview):
                        if events and isinstance(events[-1], bytes):
                            events[-1] += bytes(event)
                        else:
                            events.append(bytes(event))
                    else:
                        events.append(event)
                assert decoder.buffered <= decoder.max_properties + 100
        except SessionError as error:
            assert error.reason
            return events, error.reason
        return events, None

    def run(self, case: Case) -> None:
        parts = _parts(case)
        whole = b"".join(parts)
        with suppress(SessionError):
            CODEC.data_stream_type(whole)
        makers: tuple[Callable[[], Any], ...] = (
            CODEC.subgroup_decoder,
            lambda: CODEC.fetch_decoder(GroupOrder.ASCENDING),
            lambda: CODEC.fetch_decoder(GroupOrder.DESCENDING),
        )
        for make in makers:
            found, error = self._read(make(), parts)
            octets = [whole[i : i + 1] for i in range(min(len(whole), 2000))]
            if len(octets) == len(whole):
                again, same_error = self._read(make(), octets)
                assert (error is None) == (same_error is None), "the split decides"
                assert error is not None or found == again, "the split changes what is read"


class Datagram(Target):
    """Object datagrams; what decodes must encode to what decodes to the same."""

    name = "datagram"

    def corpus(self) -> list[Case]:
        return [[("", octets)] for octets in vectors("datagram")]

    def run(self, case: Case) -> None:
        for part in _parts(case):
            try:
                datagram = CODEC.decode_datagram(part)
            except SessionError as error:
                assert error.code == SessionErrorCode.PROTOCOL_VIOLATION
                continue
            if not isinstance(datagram, PaddingDatagram):
                assert CODEC.decode_datagram(CODEC.encode_datagram(datagram)) == datagram


class Payload(Target):
    """KVCS Object payloads, in any parts, and the names around them."""

    name = "payload"

    def __init__(self) -> None:
        context = KVCS["payload_invalid"]["context"]
        self.valid = bytes.fromhex(KVCS["payload_invalid"]["valid_hex"])
        self.context = {
            "component": Component.K,
            "layer": context["group"],
            "block": context["object"],
            "first_block": context["first_block"],
            "block_tokens": context["block_tokens"],
            "codec": 1,
            "raw_octets": context["raw_octets"],
        }

    def corpus(self) -> list[Case]:
        fields = [bytes.fromhex(each["encoded_hex"]) for each in KVCS["namespace"]]
        names = [each["moqt_namespace"].encode() for each in KVCS["namespace"]]
        uris = [b"moqt://relay.example:4433/live?x=y#kvcs:" + name for name in names]
        return [[("", octets)] for octets in (self.valid, *fields, *names, *uris)]

    def run(self, case: Case) -> None:
        parts = _parts(case)
        with suppress(DecodeError):
            assert check_payload(parts, **self.context) == self.valid[68:]
        text = b"".join(parts).decode("latin-1")
        for read in (PublicationNamespace.from_text, parse_publication_uri, parse_uri):
            try:
                read(text)
            except (DecodeError, MisuseError):
                continue


class ManifestTarget(Target):
    """KVCS manifests; what is read must write what reads to the same."""

    name = "manifest"

    def corpus(self) -> list[Case]:
        trees = [KVCS["manifest"]["manifest"]]
        trees += [each["manifest"] for each in KVCS["manifest_accepted"]]
        trees += [each["manifest"] for each in KVCS["manifest_invalid"] if "manifest" in each]
        return [[("", json.dumps(tree).encode())] for tree in trees]

    def run(self, case: Case) -> None:
        try:
            manifest = Manifest.parse(b"".join(_parts(case)))
        except (DecodeError, KvcsError) as error:
            assert str(error)
            return
        assert Manifest.parse(manifest.to_json()) == manifest


class Sections(Target):
    """K and V sections in every codec; what decodes has the raw length, and a lossless one of
    it decodes to the same."""

    name = "section"
    places = tuple(codec.label for codec in Codec)

    def __init__(self) -> None:
        tree = KVCS["manifest"]["manifest"]["compat"]
        geometry = {"kv_heads": 2, "head_dim": 4, "kv_dtype": "fp16", "block_tokens": 4}
        self.descriptor = Descriptor.parse(tree | geometry)

    def corpus(self) -> list[Case]:
        raw = bytes(range(self.descriptor.section_octets()))
        return [
            [(codec.label, bytes(encode_section(codec, octets, self.descriptor)))]
            for codec in Codec
            for octets in (raw, bytes(len(raw)))
        ]

    def run(self, case: Case) -> None:
        for label, section in case:
            codec = Codec.from_label(label)
            assert codec is not None
            try:
                raw = decode_section(codec, section, self.descriptor)
            except DecodeError as error:
                assert error.name == DecodeErrorName.SECTION_LENGTH
                continue
            assert len(raw) == self.descriptor.section_octets()
            if codec.lossless:
                again = encode_section(codec, raw, self.descriptor)
                assert decode_section(codec, again, self.descriptor) == raw


class Cose(Target):
    """COSE_Sign1 messages, which are read before any signature is verified."""

    name = "cose"

    def corpus(self) -> list[Case]:
        known = [KVCS["manifest_cose"]["small"], *KVCS["manifest_cose"]["invalid"]]
        return [[("", bytes.fromhex(each["hex"]))] for each in known]

    def run(self, case: Case) -> None:
        message = b"".join(_parts(case))
        try:
            signed = cose.read(message)
        except DecodeError as error:
            assert error.name is DecodeErrorName.BAD_COSE
            return
        assert cose.open_message(message, None) == signed.payload
        assert bytes(signed.payload) in message and signed.signature in message


class Sealed(Target):
    """Sealed Objects: the first part is the properties, what follows the payload."""

    name = "sealed"

    def __init__(self) -> None:
        key, name = ContentKey.generate(), FullTrackName((b"kvcs-1",), b"k.raw.s0")
        self.sealer, self.opener = TrackSealer(key, name), TrackOpener((key,), name)
        self.payload = bytes(100)
        self.sealed = self.sealer.seal(1, 2, 3, [self.payload])

    def corpus(self) -> list[Case]:
        return [[("", self.sealer.properties), ("", self.sealed)], [("", b""), ("", self.payload)]]

    def run(self, case: Case) -> None:
        properties, *parts = _parts(case) or [b""]
        with suppress(DecodeError):
            # whatever is altered, nothing else than what was sealed is ever given
            assert self.opener.open(1, 2, 3, properties, parts) == self.payload
