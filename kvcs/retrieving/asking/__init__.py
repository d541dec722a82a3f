"""What requests of a retrieval have in common: when they are made (`later`, `waits`), and how what
is long is read beside the event loop (`threads`).

Stands at the bottom of `retrieving`, beside `stats`; `later` is sans-IO.
"""
