"""What requests of a retrieval have in common: when they are made (`later`).

Sans-IO; stands at the bottom of `retrieving`, beside `stats`.
"""
