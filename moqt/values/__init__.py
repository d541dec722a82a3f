"""What everything in moqt speaks of: codes, names, messages, errors, settings; and small tools
that know nothing else: sets of Locations, deadlines, token caches, tables of state machines.

The ground floor: nothing of moqt is imported but siblings. No octets, those are `moqt.wire`'s,
and no clock: time is a parameter.
"""
