"""The HTTP base of every KVSP role: problem details, authentication, one application, a server.

A role is a `Service` with a table of `Operation`s. Handlers take a `Call` and return a
Starlette response; everything that all roles owe their clients happens around them.
"""
