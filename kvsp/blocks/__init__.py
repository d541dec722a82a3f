"""A block as octets: its container, codecs and layout, and files of KV caches.

`container` and `codecs` are the wire form (KVSP "Block Container"), `layout` says where a
token's keys and values are in memory, `tensors` takes those of others, `kv_files` reads and writes
what programs are given.

Imports `kvsp.names` alone of this package.
"""
