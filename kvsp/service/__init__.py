"""The server process: its settings, its roles put together, what it shows other services.

Stands below the programs alone (`kvsp.cli`) and imports every role, each where it is made:
an index starts in a third of the time that all of them take.
"""
