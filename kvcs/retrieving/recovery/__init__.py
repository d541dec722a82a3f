"""When retrieval does not go as it should.

What a timeout had waited for (`awaited`), how long nothing may come (`patience`), trying again
(`again`), what holders give meanwhile (`assisting`), why one way is left for another (`ends`), and
computing layers anew (`recomputing`).

Stands below `consumer`, above what retrieves.
"""
