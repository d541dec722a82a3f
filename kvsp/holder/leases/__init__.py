"""Leases: what must not be evicted, for whom and how long (KVSP "Leases").

`table` grants them, without I/O; `journal` keeps them beyond the process, in a file.

Imports of the holder only `uninterrupted`; then `kvsp.names`.
"""
