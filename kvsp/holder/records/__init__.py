"""The index hears what a holder holds (KVSP "Publishing and Withdrawing Replicas").

`table` decides when, `publishing` does it through an `IndexClient` (`index`); `index_client` is
the one over HTTP.

Imports `kvsp.client`, `kvsp.records` and `kvsp.names`; nothing else of the holder.
"""
