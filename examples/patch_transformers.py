"""Compiled MoE blocks inside a transformers model: the rest of it, and your code, stay as they are.

python examples/patch_transformers.py
"""

import time
from pathlib import Path

import torch
import transformers

import ktgraph as kt

MODEL = Path(__file__).parent / "models" / "tiny-deepseek-v2"


def main() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    prompt = tokenizer("Once upon a time", return_tensors="pt")

    def generate() -> str:
        began = time.perf_counter()
        ids = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0]
        print(f"[{time.perf_counter() - began:.2f} s]")
        return tokenizer.decode(ids, skip_special_tokens=True)

    print("-- eager")
    eager = generate()
    print(eager)

    print("-- the MoE blocks compiled, weights as they are: the same text")
    print(kt.patch(model))
    patched = generate()
    print(patched)
    assert patched == eager

    print("-- with int8 weights: a quarter of the memory")
    kt.unpatch(model)
    print(kt.patch(model, quantize="int8"))
    print(generate())

    print("-- and back")
    kt.unpatch(model)
    assert generate() == eager


if __name__ == "__main__":
    main()
