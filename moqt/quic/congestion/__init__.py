"""How much may be under way, and how fast: congestion control, sans-IO, without a QUIC library.

`controller` has what recovery and the algorithms say to each other; `reno`, `cubic` and `bbr` are
the algorithms, `algorithms` has their names. `delivery` measures what a path delivers, `pacer`
spreads packets over time, `reordering` says how long a packet is waited for that others have
overtaken, `losses` remembers which packets were given up, `careful_resume` what the paths of
connections that are over have held. Imports nothing of moqt.
"""
