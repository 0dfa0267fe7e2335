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


def test_vector_code_stays_in_its_unit(functions):
    path, _ = functions
    evex = re.compile(r"zmm|%k[1-7]\b|[xy]mm(1[6-9]|2\d|3[01])\b")
    vex = re.compile(r"\bymm|%ymm")
    name, bad, seen = "", [], set()
    allowed = {
        "avx512": re.compile(r"ktg::avx512(::|_)"),
        "avx": re.compile(r"ktg::avx(2|512)(::|_)"),
    }
    for line in lines("objdump", "-dC", "--no-show-raw-insn", path):
        if header := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            name = header[1]
        elif "zmm" in line and "avx512" in name:
            seen.add(name)
        elif (evex.search(line) and not allowed["avx512"].search(name)) or (
            vex.search(line) and not allowed["avx"].search(name)
        ):
            bad.append(f"{name}: {line.strip()}")
    assert not bad, bad[:5]
    assert len(seen) > 20  # else this test looks at nothing
