"""The Holder: stores and serves blocks, leases them, publishes its replicas.

`store`, `rooms` and `leases` decide (no I/O, time a parameter); `tiers` keep octets; `parts`
carries out what changes a block that is there, `holder` the rest, with `upload` and `reading`
for one block in and out; `records` keeps the index informed; `app` speaks HTTP.

Stands beside `kvsp.index` and below `kvsp.instance`, which is the holder of its own blocks;
imports `kvsp.http` and `kvsp.client` and what is below them.
"""
