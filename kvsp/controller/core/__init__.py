"""What a placement controller decides: calls and times in, effects out. No I/O.

`controller` is the whole, `instances`, `sessions`, `maps` and `prefetching` its tables,
`moves` their state machines, `effects` what they want done.

Imports `kvsp.principals`, `kvsp.records` and `kvsp.names`, never HTTP or the rest of the
controller.
"""
