"""What an inference instance decides, without engine, sockets or clock.

`agent` is the whole; `sessions`, `directives` and `shards` its tables, `moves` their state
machines, `rates` what is measured of the engine.

Imports the pool and the samplers of `kvsp.instance.engines`, `kvsp.records` and `kvsp.names`;
never HTTP or the rest of the instance.
"""
