"""Will DeepSeek-V2 (236 billion weights) run on a workstation, how fast, and what would help?

python examples/plan_a_model.py

From its config alone, in about 15 seconds.  On the command line: ktgraph plan CONFIG --target NAME.
"""

from pathlib import Path

import ktgraph as kt

CONFIG = Path(__file__).parent / "configs" / "deepseek-v2.json"


def main() -> None:
    plan = kt.plan(
        CONFIG,
        "rtx4090-24g+xeon",  # a machine that is described; "auto" is this one
        gpu_memory="24GiB",
        ram="192GiB",
        quantize="experts=int4p(group=64),*=int8",
        what_if=["gpu_memory=+8GiB", "ram=64GiB"],
    )
    print(plan)

    base = plan.base
    assert base.decode is not None, base.refusal  # None where nothing can be placed
    print(f"\ndecode is bound by {base.decode.bound}, {base.decode.speed:.1f} tokens/s")
    for row in base.holdings:
        if row.what == "routed experts":
            print(f"experts of layers {row.span} lie on {row.device}")

    short = plan.what_if("ram=64GiB")
    if short.disk is not None and short.decode is not None:
        missing = short.disk.nbytes / 2**30
        print(
            f"with 64 GiB of RAM: {missing:.0f} GiB of experts on disk, "
            f"{short.decode.speed:.1f} tokens/s"
        )


if __name__ == "__main__":
    main()
