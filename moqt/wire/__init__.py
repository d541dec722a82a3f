"""Octets to values and back: one codec per draft behind `moqt.wire.codec`."""
