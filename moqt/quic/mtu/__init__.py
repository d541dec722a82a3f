"""What a path carries: `search` finds the largest packet, `black_hole` notices that it has shrunk.

DPLPMTUD (RFC 8899) for one path of one connection. Sans-IO: sizes and what became of packets come
in, sizes to try go out. May import the settings of `moqt.quic` alone.
"""
