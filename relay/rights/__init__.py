"""Who may do what: `policy` is the hook, `refusals` asks it for every request, and `absent` what is
known not to exist; `tokens`
answers from a file of principals, which `kvsp.principals` reads for relays and services alike.

Imports `relay.config` and moqt, and in `tokens` that one module of kvsp. What is open when a
right is withdrawn ends in `relay.withdrawals`, which stands above the tracks.
"""
