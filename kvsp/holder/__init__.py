"""The Holder: stores and serves blocks, leases them, publishes its replicas.

`store` and `leases` decide (no I/O, time a parameter); `disk` and `objects` keep octets;
`holder` carries out; `publishing` keeps the index informed; `app` speaks HTTP.
"""
