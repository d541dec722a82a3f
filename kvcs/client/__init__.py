"""`kvcs.Client`, the face for inference engines: synchronous, thread-safe, never waiting for the
network (`client`). One event loop in a daemon thread (`loop`) holds a standing session per relay
(`links`); what is published is kept within a budget (`kept`, `saving`), what others publish is
looked up without asking (`directory`) and loaded layer by layer (`loading`, `arriving`, which
gives up by `stalls`). `counters` says what became of it all, `settings` what may be set.

Stands on `retrieving`, `publishing` and `finding`. Never imports `programs`, nor any engine.
"""
