"""A tour in a minute: compile a small trained model, use it, and ask it questions.

python examples/quickstart.py
"""

from pathlib import Path

import torch

import ktgraph as kt

MODEL = Path(__file__).parent / "models" / "tiny-deepseek-v2"


def main() -> None:
    exe = kt.compile(MODEL, target="cpu")

    print("-- one prompt, streamed")
    for piece in exe.generate("Once upon a time", max_new_tokens=48, stream=True):
        print(piece, end="", flush=True)
    print(f"\n[{exe.last.timing}]")

    print("-- several prompts in one ragged batch; draws depend on the seed, not on the batch")
    prompts = ["The captain looked out over the sea.", '"Where is the key?" asked']
    for prompt, text in zip(
        prompts,
        exe.generate(prompts, 24, temperature=0.7, top_p=0.9, seed=1, stop=["\n"]),
        strict=True,
    ):
        print(f"{prompt}|{text}")

    print("-- logits, as the model itself gives them")
    print(exe(torch.tensor([[0, 49, 1304, 588]])).shape)

    print("-- perplexity of a text")
    print(exe.perplexity("The sea was calm, and the ship lay at anchor in the bay."))

    print("-- stages: what the passes did, what one of them changed, why an op runs where it does")
    lowered = kt.trace(MODEL).lower("cpu", quantize="experts=int4p(group=32),*=int8")
    print(lowered.passes)
    print(lowered.diff("moe-group"))
    print(lowered.explain("%routed"))

    print("-- what it costs: predicted for one token after 512")
    print(lowered.cost_analysis().at(T=1, S=512).table())
    print(lowered.memory_analysis())


if __name__ == "__main__":
    main()
