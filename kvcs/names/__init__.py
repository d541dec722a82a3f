"""What publications are called and made of: registries, Track Namespace, Track Names, Object
payloads, manifests, and the errors of the whole package.

The lowest floor of `kvcs`: imports `kvsp.names`, `kvsp.blocks` and the values of `moqt`, no
session. `refusals` says what a refused request asks of us, to every floor above alike.
"""
