"""The Compatibility Descriptor of a model as others keep it: a folder of Hugging Face
(`model_folder`): its weights, of which the digests are kept as long as the files stay the same
(`digests`), and what else is said of computing with them (`configuration`).
`program` is `kvcs-describe`, which writes it.

Stands on nothing else of this package, and imports neither torch nor transformers.
"""
