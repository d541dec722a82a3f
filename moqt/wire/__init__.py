"""Octets to values and back: one codec per draft behind `moqt.wire.codec`, chosen by ALPN.

Nothing here knows a session or a transport. May import `moqt.values`.
"""
