"""Where a holder keeps octets: host memory, a disk, an object store.

`tiers` says what a tier does and has the one in memory; `disk` and `objects` are the others,
in the same file form. `scrubbing` reads what is kept now and then.

Imports of the holder only `store` and `uninterrupted`; then `kvsp.blocks` and `kvsp.names`.
"""
