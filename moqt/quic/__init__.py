"""QUIC and WebTransport under MOQT: `transport` is the seam that everything above sees.

Floors, the lower never importing the higher: `udp` (endpoints on asyncio) and `accept`, over
`aio` (the aioquic adapter) and `webtransport`, over `transport`, `packets` and `mtu`, over
settings, counters, windows, certificates and logs. Only `aio` and `packets` know aioquic, only
`webtransport` pylsqpack. Of the rest of moqt, only `moqt.values` may be imported.
"""
