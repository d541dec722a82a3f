"""Environments beside `.venv`, for what does not go together with what is in it: engines, the other
stores of the benches, the site's generator. `own` makes one, in the versions that were tested
(`*.txt` here); each other module is one, `python -m tools.environments.vllm FOLDER`.
"""
