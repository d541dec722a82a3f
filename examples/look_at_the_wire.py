"""Messages and Objects as octets and back: what MOQT draft-22 looks like on the wire.

Run it from a checkout, after `make install`: .venv/bin/python -m examples.look_at_the_wire

A codec is all that knows a draft's octets; decoders take them in pieces of any size.
"""

import moqt
from moqt.values.messages import Subscribe
from moqt.wire import SubgroupHeader, WholeObject, codec_for

CODEC = codec_for("moqt-22")


def show(what: str, octets: bytes) -> bytes:
    print(f"{what:<18} {len(octets):>3} octets  {octets.hex(' ')}")
    return octets


def main() -> None:
    message = Subscribe(
        request_id=0,
        namespace=(b"demo", b"live"),
        name=b"video",
        parameters=moqt.Parameters(
            subscriber_priority=7, location_filter=moqt.LocationFilter.next_object()
        ),
    )
    octets = show("SUBSCRIBE", CODEC.encode_message(message))
    decoder = CODEC.message_decoder()
    assert decoder.feed(octets[:9]) == []  # not yet
    assert decoder.feed(octets[9:]) == [message]
    print("  ", message.namespace, message.name, message.parameters.location_filter, end="\n\n")

    header = SubgroupHeader(track_alias=3, group=20, subgroup=0, priority=100)
    stream = show("subgroup header", CODEC.encode_subgroup_header(header, properties=False))
    previous = None
    for number, payload in enumerate((b"hello", b"wire")):
        head = CODEC.encode_subgroup_object(
            previous, number, with_properties=False, length=len(payload)
        )
        stream += show(f"Object {number}", head + payload)
        previous = number
    for event in CODEC.subgroup_decoder().feed(stream):
        if isinstance(event, WholeObject):
            print("  ", event.header)
            print("   payload", bytes(event.payload))
        else:
            print("  ", event)

    print()
    try:
        CODEC.message_decoder().feed(bytes.fromhex("03 0001 00"))
    except moqt.SessionError as error:
        print("a malformed message closes the session:", error)


if __name__ == "__main__":
    main()
