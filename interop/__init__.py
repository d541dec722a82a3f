"""Interoperability: our programs against implementations nobody here wrote.

`python -m interop.client` is a test client under the contract of the public interop
runner, `python -m interop.relay_entry` our relay under it, and `python -m interop.run`
installs the peers and runs every combination. See docs/interop.md.
"""
