"""Brings blocks into the engine's memory (KVSP "Prefetch Directives", "Leases", "Block Retrieval
and Storage").

`loader` has what each block needs here: room, the own store, one load at a time. `sources`
retrieves from others with the client's planner, `fetchers` are ways to them that are not HTTP.
"""
