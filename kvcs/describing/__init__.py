"""The Compatibility Descriptor of a model as others keep it: a folder of Hugging Face
(`model_folder`), of which the digests are kept as long as its files stay the same (`digests`).
`program` is `kvcs-describe`, which writes it.

Stands on nothing else of this package, and imports neither torch nor transformers.
"""
