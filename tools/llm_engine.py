"""One vLLM engine with the connector, driven by JSON lines: what `make test-vllm` and
`make demo-llm` start. It runs in the environment of `tools.environments.vllm`.

    {"tokens": [...], "count": 8, "salt": null}   generate; a salt keeps the request to itself
    {"forget": true}                              forget all pages of earlier requests

Each line is answered by one; `ready` is the first. Times are those of the machine's clock.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any


def arguments() -> argparse.Namespace:
    """What the engine is to be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="the model's folder")
    parser.add_argument("extra", help="kv_connector_extra_config, a JSON object")
    parser.add_argument("--role", default="kv_both")
    parser.add_argument("--module", default="kvcs.vllm", help="where the connector is")
    parser.add_argument("--connector", default="KvcsConnector")
    parser.add_argument("--in-process", action="store_true", help="no process for EngineCore")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--batched-tokens", type=int, default=4096)
    return parser.parse_args()


def engine_of(options: argparse.Namespace) -> Any:
    """The engine: one thread for torch, so that the same pass gives the same octets."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if options.in_process else "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import EngineArgs, LLMEngine

    transfer = {
        "kv_connector": options.connector,
        "kv_connector_module_path": options.module,
        "kv_role": options.role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": json.loads(options.extra),
    }
    from vllm.config import KVTransferConfig

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=options.model,
            dtype="bfloat16",
            max_model_len=4096,
            max_num_batched_tokens=options.batched_tokens,
            max_num_seqs=16,
            enforce_eager=True,
            tensor_parallel_size=options.tensor_parallel,
            kv_transfer_config=KVTransferConfig(**transfer),
        )
    )


class Answers:
    """Runs requests one after another."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._count = 0

    def generate(self, tokens: list[int], count: int, salt: str | None) -> dict[str, Any]:
        """The tokens that follow, their logprobs, and when the first one came."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=tokens)
        if salt is not None:
            prompt["cache_salt"] = salt
        self._count += 1
        began, first = time.time(), 0.0
        self._engine.add_request(
            f"request-{self._count}",
            prompt,
            SamplingParams(temperature=0.0, max_tokens=count, logprobs=0, ignore_eos=True),
        )
        last = None
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.outputs and output.outputs[0].token_ids and not first:
                    first = time.time()
                last = output
        assert last is not None
        chosen = last.outputs[0]
        logprobs = [
            step[token].logprob
            for step, token in zip(chosen.logprobs, chosen.token_ids, strict=True)
        ]
        return {
            "tokens": list(chosen.token_ids),
            "logprobs": logprobs,
            "began": began,
            "first": first,
            "cached": last.num_cached_tokens,
        }


def main() -> None:
    """Answer every line, until there is none."""
    options = arguments()
    engine = engine_of(options)
    answers = Answers(engine)
    out = os.fdopen(os.dup(1), "w")
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        if wanted.get("forget"):
            answer: dict[str, Any] = {"forgotten": bool(engine.reset_prefix_cache())}
        else:
            answer = answers.generate(wanted["tokens"], wanted["count"], wanted.get("salt"))
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
