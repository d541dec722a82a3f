"""How often packets are acknowledged (draft-ietf-quic-ack-frequency), without a QUIC library.

`frequency` has what a peer asked of us, and what we ask of it. Sans-IO: numbers of packets and
seconds come in. Imports nothing of moqt.
"""
