"""A consumer's search: sessions to relays, and what reaches holders (`relays`), publications
of the longest prefix (`discovery`), and which of them to try next (`candidates`).

Stands on `names`. Never imports `publishing`, nor `retrieving`, which stands above it: what an
index service has said is seen through the Protocol `candidates.Index`.
"""
