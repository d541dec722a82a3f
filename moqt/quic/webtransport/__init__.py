"""WebTransport over HTTP/3 (draft-ietf-webtrans-http3): a `Transport` on another `Transport`.

`client` and `server` are the two sides of `session`, over the HTTP/3 of `h3` and `h3_critical`.
Sans-IO. May import the modules of `moqt.quic` that stand alone and `moqt.values`; never `aio`,
`udp` or aioquic. pylsqpack is known here only.
"""
