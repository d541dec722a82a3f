"""The aioquic adapter: `Transport` over aioquic's connection, made fit for bulk transfer.

`transport` and `context` are what an endpoint uses. Below them aioquic's connection is
subclassed in steps: `sending`, `path_mtu`, `receiving`, `credit`, over `streams`, `reassembly`,
`recovery`. Sans-IO: no socket, clock or asyncio. May import `packets`, `mtu`, the modules of
`moqt.quic` that stand alone and `moqt.values`; never `udp`, `accept` or `webtransport`.
"""
