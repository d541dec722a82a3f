"""The connector in vLLM itself, on a small real model: `make test-vllm`, in its own environment.

Everything else of it is tested without vLLM, with stand-ins that are held against it here."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from kvcs import Scope
from kvcs.vllm.settings import Settings
from tests.e2e import support
from tests.kvcs.stand_ins import each_of, is_like, takes_every_call
from tests.kvcs.vllm import base
from tests.paths import ROOT
from tools.demo_llm import MODEL, Engine

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None or not MODEL.exists(),
        reason="vLLM is not installed here: make test-vllm",
    ),
    pytest.mark.timeout(600),  # importing it takes minutes on a busy machine
]

STORY = (
    "A cache that was computed once can be used many times. In the harbour of a small town there "
    "stood a lighthouse whose keeper wrote down every ship that passed, its name, its flag and the "
    "hour, in books that filled the shelves of three rooms. "
)


@each_of(base.MODULES)
def test_the_stand_ins_have_the_methods_and_parameters_of_vllm(path: str, stand_in: type) -> None:
    is_like(path, stand_in)


def test_the_connector_takes_every_call_as_vllm_makes_it() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from kvcs.vllm import KvcsConnector

    takes_every_call(KvcsConnector, KVConnectorBase_V1)


def test_the_example_is_a_configuration_that_vllm_reads() -> None:
    from vllm.config import KVTransferConfig

    told = json.loads((ROOT / "examples" / "engines" / "vllm.json").read_text())
    config = KVTransferConfig(**told)
    assert config.is_kv_producer and config.is_kv_consumer
    assert Settings.parse(config.kv_connector_extra_config).relays == ("moqt://relay.example:4443",)


@pytest.fixture
def relay(tmp_path):
    """One for each test: engines of another kind round otherwise, and have published the same."""
    folder = tmp_path / "relay"
    folder.mkdir()
    Scope.generate().save(folder / "scope.json")
    with support.relay(folder) as hub:
        yield {
            "relay": hub.url,
            "cafile": str(hub.cafile),
            "scope_key_file": str(folder / "scope.json"),
            "min_tokens": 64,
            "only_faster": False,
            "stall": 10,
            "lookup_timeout": 10,
            "timeout": 120,
        }


def prompts() -> list[list[int]]:
    """Ten, of different lengths and beginnings."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return [
        tokenizer(f"Story {number}. " + STORY * (4 + number)).input_ids[: 200 + 50 * number]
        for number in range(10)
    ]


@pytest.mark.parametrize("load", ["layerwise", "async"])
@pytest.mark.parametrize("process", ["in-process", "EngineCore"])
@pytest.mark.timeout(1200)
def test_a_loaded_prompt_gives_the_tokens_and_logprobs_of_the_engine_itself(
    relay, tmp_path, process: str, load: str
) -> None:
    """Compared with a run that takes the same pages from the engine's own prefix cache."""
    options = ["--in-process"] if process == "in-process" else []
    asked = prompts() if load == "layerwise" else prompts()[:3]
    prefill = Engine(tmp_path, "prefill", relay, "--role", "kv_producer", *options)
    decode = Engine(tmp_path, "decode", {**relay, "load": load}, "--role", "kv_consumer", *options)
    try:
        for number, tokens in enumerate(asked):
            prefill.say(tokens=tokens, count=1)
            loaded = decode.say(tokens=tokens, count=8)
            salt = f"own {number}"
            decode.say(tokens=tokens, count=1, salt=salt)  # the whole of it, in one pass
            own = decode.say(tokens=tokens, count=8, salt=salt)
            assert loaded["cached"] == own["cached"] == (len(tokens) - 1) // 128 * 128 > 0
            assert loaded["tokens"] == own["tokens"]
            assert loaded["logprobs"] == own["logprobs"]
    finally:
        prefill.close()
        decode.close()
