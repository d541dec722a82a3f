"""The placement controller: instances, sessions, Shard Maps and where requests go
(KVSP "Instance Status and Lifecycle" to "Sequence-Sharded Caches and Resharding").

`core` decides, `shell` makes durable (`journal`) and carries out, `callers` reach instances
and the index, `app` speaks HTTP. Of several controllers with one `shared_journal` one leads at a
time (`election`).

Stands beside `kvsp.instance`, above `kvsp.index`, whose service it asks when both run in one
process; imports `kvsp.http` and `kvsp.client` and what is below them.
"""
