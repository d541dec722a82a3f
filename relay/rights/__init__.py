"""Who may do what: `policy` is the hook, `refusals` asks it for every request, `tokens`
answers from a file of principals.

Imports `relay.config` and moqt. What is open when a right is withdrawn ends in
`relay.withdrawals`, which stands above the tracks.
"""
