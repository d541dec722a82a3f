"""When retrieval does not go as it should: what a timeout had waited for (`awaited`),
why one way is left for another (`ends`),
and computing layers anew (`recomputing`).

Stands below `consumer`, above what retrieves.
"""
