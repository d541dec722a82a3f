"""QUIC packets as octets: their layout, protection in batches, Retry packets.

Pure functions and small records, the ground floor of `moqt.quic`: nothing of moqt is imported
but siblings. aioquic may be.
"""
