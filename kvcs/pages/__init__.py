"""Pages of other cache managers in holders of KVSP: what `kvcs.lmcache` and `kvcs.sglang` stand on.

A page is K and V of all layers of some tokens, named by the engine's own hash of the prompt so
far. `naming` gives it its place among the blocks of KVSP, `store` (one thread with an event loop,
that never raises and never waits without an end) puts and gets it, `settings` is what an engine's
configuration may say, `counters` what became of everything. May import `kvcs.client` and
everything below it, and kvsp; no engine, and no torch.
"""
