"""The linked library: vector code stays in its ISA unit, and units share no weak symbol.

Needs `nm` and `objdump`, which come with the compiler.
"""

import re
import subprocess

import pytest


def lines(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture(scope="module")
def functions(request):
    """(address, size, demangled name) of every function, by address."""
    from ktgraph.cpu_kernels import load_native

    path = load_native().__file__
    rows = [line.split(maxsplit=3) for line in lines("nm", "-CS", "--defined-only", path)]
    found = sorted(
        (int(r[0], 16), int(r[1], 16), r[2], r[3]) for r in rows if len(r) == 4 and r[2] in "tTwW"
    )
    assert any("ktg::avx512" in name for *_, name in found), (
        f"{path} is stripped of local symbols: build it as pyproject.toml says (install.strip)"
    )
    return path, found


def test_no_weak_symbol_belongs_to_an_isa_unit(functions):
    _, found = functions
    weak = [
        name for _, _, kind, name in found if kind in "wW" and re.search(r"ktg::avx\w+::", name)
    ]
    assert not weak


# What each kind of instruction looks like, and the units that may hold it.
RULES = {
    "AVX": (
        r"\bymm|%ymm",
        "avx2 avx2_vnni avx512 avx512_vnni avx512_bf16 avx512_amx amx amx_emulated",
    ),
    "AVX-512": (
        r"zmm|%k[1-7]\b|[xy]mm(1[6-9]|2\d|3[01])\b",
        "avx512 avx512_vnni avx512_bf16 amx",
    ),
    "VNNI": (r"\bvpdp[bw]", "avx2_vnni avx512_vnni avx512_bf16 amx"),
    "AMX": (r"%tmm|\btile|ldtilecfg", "avx512_amx amx"),
    "BF16": (r"\bv(dpbf16|cvtne2?ps2?bf16)", "avx512_bf16"),
    "other extensions": (r"\bv(perm[bi]2?b|fmadd\w*ph)\b", "none"),
}


def test_vector_code_stays_in_its_unit(functions):
    path, _ = functions
    rules = {
        kind: (
            re.compile(pattern),
            re.compile(rf"ktg::({units.replace(' ', '|')})(_limits)?(::|_table)"),
        )
        for kind, (pattern, units) in RULES.items()
    }
    name, bad, seen = "", [], dict.fromkeys(RULES, 0)
    for line in lines("objdump", "-dC", "--no-show-raw-insn", path):
        if header := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            name = header[1]
            continue
        code = line.split("#")[0].split("<")[0]
        for kind, (pattern, allowed) in rules.items():
            if not pattern.search(code):
                continue
            seen[kind] += 1
            if not allowed.search(name):
                bad.append(f"{kind}: {name}: {line.strip()}")
    assert not bad, bad[:5]
    # else this test looks at nothing
    assert all(seen[kind] > 20 for kind in ("AVX", "AVX-512", "VNNI", "AMX")), seen
