"""The serving side of HTTP of every KVSP role: one application, authentication, a server.

A role is a `Service` with a table of `Operation`s. Handlers take a `Call` and return a
Starlette response; everything that all roles owe their clients happens around them (`app`,
`exchange`). `server` runs the application on sockets.

Imports `kvsp.principals`, `kvsp.records` and `kvsp.names`; never a role, and not
`kvsp.client`, which is the asking side.
"""
