"""The records that KVSP's services exchange, and what all of them compute from those.

`members` and `records` are their form and checks, `sharding` and `release` the rules of
sharded caches and of output, `costs`, `estimates` and `cats` placement, `moves` state machines
as tables, `problems` why a request is refused.

Imports `kvsp.names`; no I/O, and no HTTP beyond the words of problem details.
"""
