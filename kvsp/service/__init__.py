"""The server process: its settings, its roles put together, what it shows other services.

`settings` says what there is to set, `schema` what each is called, `sources` where it comes
from, `checking` what is wrong with it; `server` makes the roles, `stores` and `data_folder` what
they keep things in, `peers` what they show.

Stands below the programs alone (`kvsp.cli`) and imports every role, each where it is made:
an index starts in a third of the time that all of them take.
"""
