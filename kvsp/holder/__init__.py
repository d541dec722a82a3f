"""The Holder: stores and serves blocks, leases them, publishes its replicas.

`store` and `leases` decide (no I/O, time a parameter); `tiers` keep octets; `holder` carries
out, with `upload` and `reading` for one block in and out; `records` keeps the index informed;
`app` speaks HTTP.

Stands beside `kvsp.index` and below `kvsp.instance`, which is the holder of its own blocks;
imports `kvsp.http` and `kvsp.client` and what is below them.
"""
