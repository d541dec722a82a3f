"""When retrieval does not go as it should: what a timeout had waited for (`awaited`),
and computing layers anew (`recomputing`).

Stands below `consumer`, above what retrieves.
"""
