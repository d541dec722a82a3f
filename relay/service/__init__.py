"""The relay as a process: `entry` and `cli` are `kvcs-relay`, `daemon` its sockets, time and
signals, `metrics` and `transport_metrics` its numbers.

The top floor: it imports everything of the relay, and nothing imports it.
"""
