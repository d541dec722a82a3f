"""Networks that are not there: links that delay and lose, and a UDP proxy made of them.

`link` is the sans-IO core: it says when a datagram arrives. The simulator of the tests drives it
with a virtual clock, `proxy` with sockets; `python -m tools.path` is the proxy's program.
"""
