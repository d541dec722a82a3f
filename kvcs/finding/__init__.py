"""A consumer's search: sessions to relays, and what reaches holders (`relays`), publications
by one standing listing (`listing`) or prefix by prefix (`probing`), whether who tells of none can
tell (`telling`), and which of them to try next
(`candidates`).

Stands on `names`. Never imports `publishing`, nor `retrieving`, which stands above it: what an
index service has said is seen through the Protocol `candidates.Index`.
"""
