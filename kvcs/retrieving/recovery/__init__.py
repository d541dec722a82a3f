"""When retrieval does not go as it should: what a timeout had waited for (`awaited`).

Stands below `consumer`, above what retrieves.
"""
