"""A producer's side: a publication as tracks to be served (`publication`), put step by
step on an event loop (`stepwise`), announced on every session to a relay (`standing`), and its
records at an index service (`replicas`).

Stands on `names`. Never imports `finding` or `retrieving`, nor they this.
"""
