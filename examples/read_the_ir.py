"""Read the IR: parse a graph, look around in it, run it, change it, and see what changed.

python examples/read_the_ir.py

The graph is a text file (docs/ir.md has the grammar).  `ktgraph dump MODEL` writes such files for a
model of yours; `ktgraph opt FILE` goes on from any of them.
"""

from collections import Counter
from pathlib import Path

import torch

from ktgraph.drive import drive, make_trace
from ktgraph.ir import parse_file, parse_module
from ktgraph.ir.verify import VerifyError, verify
from ktgraph.pass_manager import PassManager
from ktgraph.weights.evaluate import WeightEvaluator
from ktgraph.weights.sources import RandomSource

FILE = Path(__file__).parent / "moe_layer.ktir"


def main() -> None:
    module = parse_file(FILE)

    print("-- what is in it: printed text parses back to the same bytes")
    assert str(parse_module(str(module))) == str(module)
    main_function = module.functions["main"]
    print("arguments:", *(f"%{a.name}: {a.type}" for a in main_function.args), sep="\n  ")
    print("sizes:", module.dims)
    print("ops:", dict(Counter(op.name for op in module.walk()).most_common(4)))

    print("-- one op: its line, its operands, who reads its result")
    routed = next(op for op in module.walk() if op.name == "moe.grouped_mlp")
    print(routed)
    print("reads weights:", *routed.weights, "| is read by:", routed.result.users[0])
    experts = module.weight_of(routed.weight(3))
    print(f"{experts.name} is {experts.type}, from {experts.source}")

    print("-- it runs: at small sizes, on random weights, in float64")
    small = module.rebind(D=48, E=6, F=20, VOC=37)
    weights = WeightEvaluator(small, RandomSource(small), torch.float64)
    logits = drive(small, weights, make_trace(vocabulary=37))
    print("logits of a ragged prefill, a chunk, two decode steps:", [list(t.shape) for t in logits])

    print("-- passes rewrite it; the report says which, and how far results moved")
    report = PassManager().run(module, "merge-linears,fuse-norms", validate=1)
    print(report)
    print(report.diff("fuse-norms", context=0))
    print(report.why_not("fuse-norms", layer=0))

    print("-- what is wrong in a text is said with its line")
    broken = FILE.read_text().replace("%l0.y = tensor.add %l0.x", "%l0.y = tensor.add %l0.q")
    try:
        verify(parse_module(broken))
    except VerifyError as error:
        print(error)


if __name__ == "__main__":
    main()
