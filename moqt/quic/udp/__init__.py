"""One UDP socket and its connections on asyncio: batches in, batches out; who may come in.

The top floor of `moqt.quic`, and the only one with sockets, clocks and asyncio. May import
`aio`, `packets` and the modules of `moqt.quic` that stand alone, and `moqt.values`; never
aioquic, nor `webtransport`: what runs on a connection is its handler's business.
"""
