"""What a relay tells of itself: `process` and `transport` are numbers beside those of
`relay.service.metrics`, `names` what all of them are called where they are exported, `logs` its
lines on standard error, `page` the status page and `grids` what it shows of publications.

It imports all of the relay but the rest of `relay.service`.
"""
