"""The second profile, "KVCache over MoQT": one Object per token, named by model and prompt.

`names` (namespace, Track Names), `elements` (a token's payload), `chunks` (what arrives, put
together; sans-IO), `publication` and `consumer` (the two ends on a session).

It shares nothing with the KVCS profile but sessions, descriptors and errors, and promises much
less: its names show prompt and model to every relay, nothing but the length of an Object is
checked, and nothing says which weights or tokenizer a cache is of. Imports `names` alone; never
`finding`, `publishing`, `retrieving` or `programs`.
"""
