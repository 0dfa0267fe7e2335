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


@pytest.fixture(scope="module")
def code(functions):
    """Instructions of every function, by its demangled name."""
    path, _ = functions
    found, name = {}, ""
    for line in lines("objdump", "-dC", "--no-show-raw-insn", path):
        if header := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            name = header[1]
        elif "\t" in line:
            found.setdefault(name, []).append(line.split("\t", 1)[1])
    return found


@pytest.mark.parametrize(
    ("function", "mnemonic", "chains"),
    [
        ("avx2_limits::f32", "vfmadd", 12),
        ("avx512_limits::f32", "vfmadd", 16),
        ("avx512_vnni_limits::int8", "vpdpbusd", 16),
        ("avx512_bf16_limits::bf16", "vdpbf16ps", 16),
        ("avx512_amx_limits::int8", "tdpbssd", 4),
        ("avx512_amx_limits::int8_loaded", "tdpbssd", 4),
        ("avx512_amx_limits::bf16", "tdpbf16ps", 4),
    ],
)
def test_peaks_are_measured_on_many_sums(code, function, mnemonic, chains):
    """One sum counted many times would measure latency and call it a rate."""
    (body,) = [c for name, c in code.items() if name.startswith(f"ktg::{function}(")]
    sums = {i.split("#")[0].split(",")[-1].strip() for i in body if i.startswith(mnemonic)}
    assert len(sums) == chains


@pytest.mark.parametrize("unit", ["avx512_vnni", "avx512_bf16", "amx"])
def test_sums_of_a_panel_stay_in_registers(code, unit):
    """6 rows of 4 tiles: 24 sums, and no vector goes through the stack between two products."""
    named = rf"ktg::{unit}::\(anonymous namespace\)::int_panel_block<0, 6, 4>"
    (body,) = [c for name, c in code.items() if re.search(named, name)]
    products = [i for i, text in enumerate(body) if text.startswith("vpdpbusd")]
    assert len(products) == 24
    loop = body[products[0] : products[-1]]
    assert [i for i in loop if "%zmm" in i and "(%rsp)" in i] == []
