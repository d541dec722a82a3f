"""What a session says and hears, as qlog events and as lines for people.

`describe` gives messages as fields and lines, `event_log` writes what a session tells it, and
`logged_transport` reads along what goes out. May import `moqt.wire`, `moqt.values` and of
`moqt.quic` the seam and the qlog writer; never the session, of which it knows what `Logged` says.
"""
