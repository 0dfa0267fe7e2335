"""The engine and the plan: threads, errors, fork, ISA choice, what Plan.add and Plan.run refuse."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch


def test_threads_and_cpus(tools):
    native = tools.native
    e = native.Engine(3)
    assert e.threads == 3
    assert e.isa in tools.ISAS
    assert native.Engine(0).threads == len(native.default_cpus())
    assert native.Engine(2, cpus=native.default_cpus()[:1]).threads == 2


def test_idle_engine_costs_no_cpu(tools):
    e = tools.native.Engine(3)
    lab = tools.Lab(e.isa, torch.float32, 3)
    x, y = lab.randn(1, 8), lab.out(1, 8)
    p = tools.native.Plan(e)
    p.add("cpu.copy", [lab.tok(x), lab.tok(y)])
    p.run(1)
    time.sleep(0.05)  # the spinning time is over
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_a_long_plan_and_timings(tools):
    lab = tools.Lab(tools.ISAS[0], torch.float32, 3)
    p = tools.native.Plan(tools.engine(3, lab.isa))
    x = lab.randn(5, 40)
    y = x.clone()
    one = torch.ones(5, 40)
    for _ in range(300):
        p.add("cpu.add", [lab.tok(y), lab.tok(one), lab.tok(y)])
    assert len(p) == 300
    assert p.kernel(0) == "cpu.add"
    p.run(5)
    torch.testing.assert_close(y, x + 300)
    seconds = p.run_timed(5)
    assert len(seconds) == 300
    assert all(s >= 0 for s in seconds)


def test_python_threads_take_turns(tools):
    lab = tools.Lab(tools.ISAS[0], torch.float32, 2)
    p, y = tools.native.Plan(tools.engine(2, lab.isa)), torch.zeros(1, 64)
    one = torch.ones(1, 64)
    p.add("cpu.add", [lab.tok(y), lab.tok(one), lab.tok(y)])
    workers = [threading.Thread(target=lambda: [p.run(1) for _ in range(50)]) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert (y == 200).all()


def test_an_error_leaves_the_engine_usable(tools):
    lab = tools.Lab(tools.ISAS[0], torch.float32, 2)
    ids, table, y = torch.tensor([9], dtype=torch.int32), lab.randn(5, 8), lab.out(1, 8)
    p = tools.native.Plan(tools.engine(2, lab.isa))
    p.add("cpu.embedding", [lab.tok(ids), lab.tensor(table), lab.tok(y)])
    for _ in range(3):
        with pytest.raises(RuntimeError, match="outside the vocabulary: 9"):
            p.run(1)
    ids[0] = 4
    p.run(1)
    assert torch.equal(y[0], table[4])


def test_fork_gives_a_clear_error(tools):
    lab = tools.Lab(tools.ISAS[0], torch.float32, 2)
    x, y = lab.randn(1, 8), lab.out(1, 8)
    p = tools.native.Plan(tools.engine(2, lab.isa))
    p.add("cpu.copy", [lab.tok(x), lab.tok(y)])
    pid = os.fork()
    if pid == 0:
        try:
            p.run(1)
        except RuntimeError as e:
            os._exit(0 if "fork" in str(e) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# choice of the ISA


def fresh_native(tools, code, isa):
    """Runs code in a new process with the compiled module as `n`, without importing the package."""
    load = f"""import importlib.util as u
spec = u.spec_from_file_location("_native", {tools.native.__file__!r})
n = u.module_from_spec(spec)
spec.loader.exec_module(n)
"""
    env = {**os.environ, "KTGRAPH_ISA": isa}
    command = [sys.executable, "-c", load + code]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    return done.stdout.strip(), done.stderr


def test_isa_by_environment(tools):
    code = "print(n.isa_info()['chosen'], n.isa_info()['why'], n.Engine(1).isa)"
    out, err = fresh_native(tools, code, "avx2")
    assert out == "avx2 forced by KTGRAPH_ISA avx2", err
    _, err = fresh_native(tools, "n.Engine(1)", "sse9")
    assert "RuntimeError: KTGRAPH_ISA=sse9 is not a known level" in err


def test_isa_info(tools):
    info = tools.native.isa_info()
    assert info["flags"]["avx2"]
    assert info["flags"]["fma"]
    assert info["chosen"] in tools.ISAS
    if info["best"] == "avx2":
        with pytest.raises(RuntimeError, match=r"lacks avx512|lacks os_zmm"):
            tools.native.Engine(1, isa="avx512")


# what Plan refuses


@pytest.fixture
def plan(tools):
    return tools.native.Plan(tools.engine(1, tools.ISAS[0]), max_tokens=8)


def refused(plan, match, kernel, operands, attrs=None, error: type[Exception] = ValueError):
    with pytest.raises(error, match=match):
        plan.add(kernel, operands, attrs or {})


def test_add_refuses(tools, plan):
    native, lab = tools.native, tools.Lab(tools.ISAS[0], torch.float32)
    x, w, y = lab.randn(4, 33), lab.randn(33), lab.out(4, 33)
    ids = torch.zeros(4, dtype=torch.int32)
    ok = [lab.tok(x), lab.tensor(w), lab.tok(y)]
    eps = {"eps": 1e-6}
    plan.add("cpu.rms_norm", ok, eps)
    refused(plan, "no kernel named 'cpu.nothing'", "cpu.nothing", [])
    refused(plan, "3 operands expected .* got 2", "cpu.rms_norm", ok[:2], eps)
    refused(plan, "attribute eps is missing", "cpu.rms_norm", ok)
    refused(plan, "unknown attribute epsilon", "cpu.rms_norm", ok, {**eps, "epsilon": 1.0})
    refused(plan, "attribute eps must be a number", "cpu.rms_norm", ok, {"eps": "small"})
    refused(plan, "w: f32 expected, got None", "cpu.rms_norm", [ok[0], None, ok[2]], eps)
    refused(plan, "x: f expected, got Tensor i32", "cpu.rms_norm", [lab.tok(ids), *ok[1:]], eps)
    refused(
        plan, "w: axis D is 32, but 33", "cpu.rms_norm", [ok[0], lab.tensor(w[:32]), ok[2]], eps
    )
    refused(plan, "y: axis T is 4, but T in", "cpu.rms_norm", [*ok[:2], lab.tensor(y)], eps)
    refused(plan, "an operand must be", "cpu.rms_norm", [x, *ok[1:]], eps, TypeError)
    refused(plan, "must be an int, float", "cpu.rms_norm", ok, {"eps": [1]}, TypeError)
    wt = lab.weight("bf16", lab.randn(8, 33))[0]
    refused(plan, "y: axis N is 33, but 8", "cpu.linear", [ok[0], wt, None, ok[2]])
    stack = lab.weight("bf16", lab.randn(2, 8, 33))[0]
    refused(
        plan, "one matrix expected, got a stack of 2", "cpu.linear", [ok[0], stack, None, ok[2]]
    )
    refused(plan, "must be packed with gate_up", "cpu.swiglu", [ok[0], wt, wt, ok[2]])
    gate = lab.tensor(lab.randn(6, 33))
    k = [lab.tok(torch.zeros(4, 7, dtype=torch.int32)), lab.tok(torch.zeros(4, 7))]
    refused(
        plan, "top-k 7 of 6 experts", "cpu.moe_route", [ok[0], gate, None, *k], {"score": "softmax"}
    )
    refused(
        plan, "unknown value 'tanh'", "cpu.moe_route", [ok[0], gate, None, *k], {"score": "tanh"}
    )
    batch = tools.Batch([(0, 4)], 4)
    cache = tools.Cache(torch.float32, 2, batch, [40])
    latent = [lab.tok(lab.randn(4, 30)), lab.tok(lab.randn(4, 10)), cache.native, native.BATCH]
    plan.add("cpu.kv_append_latent", latent, {"layer": 1})
    refused(
        plan,
        "layer 2 is outside the state's 2 layers",
        "cpu.kv_append_latent",
        latent,
        {"layer": 2},
    )
    refused(
        plan, "width 40, expected 43", "cpu.kv_append_latent", [ok[0], *latent[1:]], {"layer": 0}
    )
    refused(plan, "attribute layer must be an int", "cpu.kv_append_latent", latent, {"layer": 1.0})


def test_run_refuses(tools, plan):
    native, lab = tools.native, tools.Lab(tools.ISAS[0], torch.float32)
    batch = tools.Batch([(0, 4)], 4)
    cache = tools.Cache(torch.float32, 1, batch, [40])
    x = lab.randn(8, 30)
    plan.add(
        "cpu.kv_append_latent",
        [lab.tok(x), lab.tok(lab.randn(8, 10)), cache.native, native.BATCH],
        {"layer": 0},
    )
    with pytest.raises(ValueError, match="none was given"):
        plan.run(4)
    with pytest.raises(ValueError, match="4 tokens, T is 3"):
        plan.run(3, 0, batch.native)
    with pytest.raises(ValueError, match="exceed this plan's max_tokens = 8"):
        plan.run(9)
    other = tools.Batch([(0, 4)], 4)
    other.table[0, 0] = 99
    i32 = lambda a: np.asarray(a, np.int32)  # noqa: E731
    other.native.set(
        i32(other.seq), i32(other.pos), i32(other.start), i32(other.kv_len), other.table, i32([])
    )
    with pytest.raises(ValueError, match="uses page 99 of a state of 4 pages"):
        plan.run(4, 0, other.native)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tok_pos": [0, 1]}, "differ in length"),
        ({"kv_len": [2]}, "position 2, its sequence has kv_len 2"),
        ({"seq_start": [0, 2]}, "from 0 to the number"),
        ({"tok_seq": [0, 0, 1]}, "by tok_seq"),
        ({"kv_len": [], "seq_start": [0], "block_table": np.zeros((0, 1))}, "from 0 to the number"),
        ({"block_table": [0]}, "must have 2 axes"),
    ],
)
def test_batch_refuses(tools, change, match):
    good = {
        "tok_seq": [0, 0, 0],
        "tok_pos": [0, 1, 2],
        "seq_start": [0, 3],
        "kv_len": [3],
        "block_table": [[0]],
        "out_rows": [2],
    }
    b = tools.native.Batch()
    b.set(**{k: np.asarray(v, np.int32) for k, v in good.items()})
    with pytest.raises(ValueError, match=match):
        b.set(**{k: np.asarray(v, np.int32) for k, v in {**good, **change}.items()})


def test_kernels_are_listed(tools):
    docs = tools.native.kernels()
    assert len(docs) == 22
    assert "operands: x:f[T,K] w:weight[N,K] bias?:f32[N] -> y:f[T,N]" in docs["cpu.linear"]


def test_self_check(tools):
    from ktgraph.cpu_kernels import self_check

    found = self_check()
    assert len(found) > len(tools.native.kernels())  # by name: tests/test_self_check.py
    for _, check in found:
        assert check()
