"""What comes from the peer: its streams and datagrams, for whom they are, and who takes Objects.

A reader stands at every stream of the peer's; it needs of its session and of the requests only
what `host` says. May import `moqt.track`, `moqt.log`, `moqt.wire`, `moqt.values` and of
`moqt.quic` only the seam, `moqt.quic.transport`. Never requests or the session, which stand
above, nor delivery beside it.
"""
