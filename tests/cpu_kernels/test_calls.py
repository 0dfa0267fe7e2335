"""Calls without the caller: submit and wait, the C functions for host callbacks, mailboxes."""

import ctypes
import gc
import os
import threading
import time

import numpy as np
import pytest
import torch

SECONDS = 30  # after so long a missing answer counts as none


@pytest.fixture
def counter(tools):
    """(plan, tensor): each run of the plan adds one to the tensor's first T rows."""
    lab = tools.Lab(tools.ISAS[0], torch.float32, 2)
    y, one = torch.zeros(4, 64), torch.ones(4, 64)
    plan = tools.native.Plan(tools.engine(2, lab.isa), max_tokens=4)
    plan.add("cpu.add", [lab.tok(y), lab.tok(one), lab.tok(y)])
    yield plan, y
    del lab


@pytest.fixture
def failing(tools):
    """(plan, ids): fails unless ids[0] is below 5."""
    lab = tools.Lab(tools.ISAS[0], torch.float32, 2)
    ids, table, y = torch.tensor([9], dtype=torch.int32), lab.randn(5, 8), lab.out(1, 8)
    plan = tools.native.Plan(tools.engine(2, lab.isa))
    plan.add("cpu.embedding", [lab.tok(ids), lab.tensor(table), lab.tok(y)])
    yield plan, ids
    del lab


def until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "no answer"
        time.sleep(0)


# submit and wait


def test_submitted_calls_run_in_order(counter):
    plan, y = counter
    calls = [plan.submit(2) for _ in range(20)]
    calls[-1].wait()
    assert all(c.done() for c in calls)
    assert (y[:2] == 20).all()
    assert (y[2:] == 0).all()
    for c in calls:
        c.wait()  # again is allowed


def test_submit_and_run_take_turns(counter):
    plan, y = counter
    calls = []
    for _ in range(50):
        calls.append(plan.submit(4))
        plan.run(4)
    for c in calls:
        c.wait()
    assert (y == 100).all()


def test_an_error_is_raised_by_wait(failing):
    plan, ids = failing
    call = plan.submit(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="outside the vocabulary: 9"):
            call.wait()
    ids[0] = 4
    call.submit()
    call.wait()
    with pytest.raises(RuntimeError, match="T and O must not be negative"):
        plan.submit(-1).wait()


def test_a_dropped_call_is_waited_for(counter):
    plan, y = counter
    for _ in range(20):
        plan.submit(4)
    gc.collect()
    assert (y == 20).all()


def test_a_call_outlives_its_names(tools):
    lab = tools.Lab(tools.ISAS[0], torch.float32, 2)
    x, y = lab.randn(3, 64), lab.out(3, 64)
    plan = tools.native.Plan(tools.native.Engine(2, isa=lab.isa))
    plan.add("cpu.copy", [lab.tok(x), lab.tok(y)])
    call = plan.submit(3)
    del plan  # and with it the engine's last name
    gc.collect()
    call.wait()
    assert torch.equal(x, y)


def test_the_batch_of_a_pending_call_is_its_own(tools):
    """Setting the batch again must not change what was submitted with it."""
    lab = tools.Lab(tools.ISAS[0], torch.float32, 2)
    rows, cols = 512, 512
    x, y = lab.randn(8, 16), lab.out(2, 16)
    w, big = lab.weight("f32", lab.randn(rows, cols))[0], lab.randn(8, cols)
    plan = tools.native.Plan(tools.engine(2, lab.isa))
    for _ in range(50):  # so that the gather runs after the batch was set again
        plan.add("cpu.linear", [lab.tok(big), w, None, lab.tok(lab.out(8, rows))])
    plan.add("cpu.gather_rows", [lab.tok(x), tools.native.BATCH, lab.tensor(y, -2)])
    batch = tools.Batch([(0, 8)], 8, out_rows=[3, 5])
    other = tools.Batch([(0, 8)], 8, out_rows=[0, 0])
    call = plan.submit(8, 2, batch.native)
    i32 = lambda a: np.asarray(a, np.int32)  # noqa: E731
    batch.native.set(
        i32(other.seq), i32(other.pos), i32(other.start), i32(other.kv_len), other.table, i32([0])
    )
    call.wait()
    assert torch.equal(y, x[[3, 5]])


def test_a_prepared_call(counter):
    plan, y = counter
    call = plan.prepare(1)
    assert call.done()
    with pytest.raises(RuntimeError, match="never submitted"):
        call.wait()
    for _ in range(3):
        call.submit()
        call.wait()
    call.set(2)
    call.run()
    call.wait()
    assert y[:, 0].tolist() == [4, 1, 0, 0]
    header = np.array([3, 0], np.int32)
    call.set(header=header.ctypes.data)
    call.run()
    header[0] = 4
    call.run()
    call.wait()
    assert y[:, 0].tolist() == [6, 3, 2, 1]
    header[0] = 5
    call.run()
    with pytest.raises(RuntimeError, match="exceed this plan's max_tokens = 4"):
        call.wait()
    with pytest.raises(ValueError, match="4-byte aligned"):
        plan.prepare(header=header.ctypes.data + 1)


def test_a_pending_call_is_not_submitted_twice(tools):
    lab = tools.Lab(tools.ISAS[0], torch.float32, 2)
    x, w = lab.randn(64, 512), lab.weight("f32", lab.randn(512, 512))[0]
    plan = tools.native.Plan(tools.engine(2, lab.isa))
    for _ in range(100):
        plan.add("cpu.linear", [lab.tok(x), w, None, lab.tok(lab.out(64, 512))])
    refused = []
    for _ in range(20):  # a busy machine may let the run end before we ask again
        call = plan.submit(64)
        refused = [
            r for again in (call.submit, call.run, lambda c=call: c.set(1)) if (r := tell(again))
        ]
        call.wait()
        if len(refused) == 3:
            break
    assert len(refused) == 3
    assert all("still pending" in r for r in refused)


def tell(call):
    """The message of the RuntimeError that it raises, or an empty string."""
    try:
        call()
    except RuntimeError as e:
        return str(e)
    return ""


def test_a_plan_may_grow_while_calls_are_pending(counter, tools):
    plan, y = counter
    lab = tools.Lab(tools.ISAS[0], torch.float32, 2)
    x, z = lab.randn(4, 64), lab.out(4, 64)
    calls = [plan.submit(4) for _ in range(10)]
    plan.add("cpu.copy", [lab.tok(x), lab.tok(z)])
    plan.scratch(4, 0, 0, 0, 0, 2)
    for c in calls:
        c.wait()
    assert (y == 10).all()
    plan.run(4)
    assert torch.equal(x, z)


# the C functions


def c_function(address):
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


def test_c_functions(tools, counter, failing):
    native = tools.native
    plan, y = counter
    call = plan.prepare(4)
    for _ in range(3):
        c_function(native.RUN_CALL)(call.address)
    assert call.done()
    c_function(native.SUBMIT_CALL)(call.address)
    c_function(native.WAIT_CALL)(call.address)
    assert call.done()
    call.wait()
    assert (y == 4).all()
    bad = failing[0].prepare(1)
    c_function(native.RUN_CALL)(bad.address)  # throws nothing into C
    with pytest.raises(RuntimeError, match="outside the vocabulary"):
        bad.wait()


def test_c_functions_have_names_for_a_loader(tools):
    library = ctypes.CDLL(tools.native.__file__)
    found = ctypes.cast(library.ktgraph_run_call, ctypes.c_void_p).value
    assert found == tools.native.RUN_CALL


def test_c_functions_from_a_foreign_thread(tools, counter):
    plan, y = counter
    call = plan.prepare(4)
    run = c_function(tools.native.RUN_CALL)
    thread = threading.Thread(target=lambda: [run(call.address) for _ in range(10)])
    thread.start()
    thread.join()
    call.wait()
    assert (y == 10).all()


# mailboxes


class Box:
    """Request, reply and header in one buffer, a cache line each."""

    def __init__(self):
        self.words = np.zeros(64, np.int32)

    def address(self, line):
        return self.words.ctypes.data + 64 * line

    @property
    def arguments(self):
        return {"request": self.address(0), "reply": self.address(1), "header": self.address(2)}

    def ask(self, value, T=0):
        self.words[32:34] = T, 0
        self.words[0] = value

    def answer(self):
        return int(self.words[16])

    def wait(self, value):
        until(lambda: self.answer() == value)


def test_mailbox_with_epochs(counter):
    plan, y = counter
    box = Box()
    service = plan.serve(**box.arguments)
    for epoch in range(1, 101):
        box.ask(epoch, T=1 + epoch % 4)
        box.wait(epoch)
        assert box.words[0] == 0  # taken
    assert service.running
    assert service.served == 100
    service.stop()
    assert not service.running
    assert y[:, 0].tolist() == [100, 75, 50, 25]


def test_mailbox_with_a_constant(counter):
    """As a captured CUDA graph asks: the same value each time, the reply cleared in between."""
    plan, y = counter
    box = Box()
    service = plan.serve(**{**box.arguments, "header": 0}, T=4)
    for _ in range(50):
        box.words[16] = 0
        box.ask(1)
        box.wait(1)
    service.stop()
    assert (y == 50).all()


def test_mailbox_wakes_from_its_sleep(counter):
    plan, y = counter
    box = Box()
    service = plan.serve(**box.arguments, spin_us=0)
    for epoch in range(1, 4):
        time.sleep(0.02)
        box.ask(epoch, T=4)
        box.wait(epoch)
    service.stop()
    assert (y == 3).all()


def test_idle_mailbox_costs_little_cpu(counter):
    box = Box()
    service = counter[0].serve(**box.arguments, spin_us=1000)
    box.ask(1, T=4)
    box.wait(1)
    time.sleep(0.05)  # the spinning time is over
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.1
    service.stop()


def test_a_failed_request_poisons_the_reply(tools, counter, failing):
    native = tools.native
    box, good = Box(), Box()
    service = native.Service(tools.engine(2, tools.ISAS[0]))
    service.add(failing[0], **box.arguments)
    service.add(counter[0], **good.arguments)
    service.start()
    good.ask(1, T=4)
    good.wait(1)
    service.check()
    box.ask(7, T=1)
    box.wait(7 | native.REPLY_FAILED)
    good.ask(2, T=4)  # what follows may build on the missing outputs
    good.wait(2 | native.REPLY_FAILED)
    for check in (service.check, service.stop):
        with pytest.raises(RuntimeError, match=r"mailbox 0: .*outside the vocabulary: 9"):
            check()
    assert (counter[1] == 1).all()
    failing[1][0] = 3
    service.start()  # afresh
    box.ask(8, T=1)
    box.wait(8)
    service.stop()


def test_spans_of_answers(tools):
    lab = tools.Lab(tools.ISAS[0], torch.float32, 2)
    y, one = torch.zeros(2, 64), torch.ones(2, 64)
    boxes, service = [Box() for _ in range(3)], tools.native.Service(tools.engine(2, lab.isa))
    for box in boxes:
        plan = tools.native.Plan(tools.engine(2, lab.isa))
        plan.add("cpu.add", [lab.tok(y), lab.tok(one), lab.tok(y)])
        service.add(plan, **box.arguments)
    service.start()
    assert service.spans() == []
    marks = [time.perf_counter_ns()]
    for number in (2, 0, 1, 2):
        boxes[number].ask(len(marks), T=2)
        boxes[number].wait(len(marks))
        marks.append(time.perf_counter_ns())
    spans = service.spans()
    assert [box for box, _, _ in spans] == [2, 0, 1, 2]
    for (_, begin, end), asked, seen in zip(spans, marks, marks[1:], strict=False):
        assert asked < begin < end < seen  # the clock of time.perf_counter
    assert sum(e - b for _, b, e in spans) == round(service.busy_seconds * 1e9)
    assert service.spans() == []  # taken
    for epoch in range(10, 1110):  # more than are kept
        boxes[0].ask(epoch, T=2)
        boxes[0].wait(epoch)
    assert len(service.spans()) == 1024
    boxes[1].ask(1, T=2)
    boxes[1].wait(1)
    assert [box for box, _, _ in service.spans()] == [1]
    service.stop()


def test_sizes_from_the_mailbox_are_checked(tools, counter):
    box = Box()
    service = counter[0].serve(**box.arguments)
    box.ask(1, T=5)
    box.wait(1 | tools.native.REPLY_FAILED)
    with pytest.raises(RuntimeError, match="exceed this plan's max_tokens = 4"):
        service.stop()


def test_a_mailbox_for_each_layer(tools):
    """Several plans of one engine in turn, each reading what the one before wrote."""
    lab = tools.Lab(tools.ISAS[0], torch.float32, 2)
    y, one = torch.zeros(2, 64), torch.ones(2, 64)
    engine = tools.engine(2, lab.isa)
    boxes, service = [Box() for _ in range(5)], tools.native.Service(engine)
    for box in boxes:
        plan = tools.native.Plan(engine)
        plan.add("cpu.add", [lab.tok(y), lab.tok(one), lab.tok(y)])
        plan.add("cpu.add", [lab.tok(y), lab.tok(y), lab.tok(y)])
        service.add(plan, **box.arguments)
    del plan
    gc.collect()
    service.start()
    for step in range(1, 4):
        for box in boxes:
            box.ask(step, T=2)
            box.wait(step)
    service.stop()
    want = 0
    for _ in range(15):
        want = 2 * (want + 1)
    assert (y == want).all()


def test_service_refuses(tools, counter):
    native, box = tools.native, Box()
    plan = counter[0]
    service = native.Service(tools.engine(2, tools.ISAS[0]))
    with pytest.raises(RuntimeError, match="no mailbox"):
        service.start()
    with pytest.raises(ValueError, match="4-byte aligned"):
        service.add(plan, box.address(0) + 2, box.address(1))
    with pytest.raises(ValueError, match="two words"):
        service.add(plan, box.address(0), box.address(0))
    with pytest.raises(ValueError, match="another engine"):
        native.Service(native.Engine(1)).add(plan, box.address(0), box.address(1))
    with pytest.raises(ValueError, match="spin_us"):
        native.Service(tools.engine(2, tools.ISAS[0]), spin_us=-1)
    service.add(plan, **box.arguments)
    service.start()
    with pytest.raises(RuntimeError, match="runs already"):
        service.add(plan, **box.arguments)
    with pytest.raises(RuntimeError, match="runs already"):
        service.start()
    service.stop()
    service.stop()  # again does nothing


def test_a_dropped_service_stops(counter):
    plan, _ = counter
    box, before = Box(), thread_ids()
    service = plan.serve(**box.arguments)
    (own,) = thread_ids() - before
    del service
    gc.collect()
    until(lambda: own not in thread_ids())


def thread_ids():
    return set(os.listdir("/proc/self/task"))


# two engines, and fork


def test_two_engines_side_by_side(tools):
    """Each with its own caller, on the same CPUs; the bits do not depend on it."""
    lab = tools.Lab(tools.ISAS[0], torch.float32, 2)
    x, w = lab.randn(17, 130), lab.weight("int8", lab.randn(70, 130))[0]
    outs, threads = [lab.out(17, 70) for _ in range(2)], []
    alone = lab.out(17, 70)
    lab.run("cpu.linear", [lab.tok(x), w, None, lab.tok(alone)], T=17)
    for y in outs:
        plan = tools.native.Plan(tools.native.Engine(2, isa=lab.isa))
        plan.add("cpu.linear", [lab.tok(x), w, None, lab.tok(y)])
        run = lambda plan=plan: [plan.run(17) for _ in range(200)]  # noqa: E731
        threads.append(threading.Thread(target=run))
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for y in outs:
        assert torch.equal(y, alone)


def in_child(work):
    """Exit code of a forked child that runs `work`; it must not hang."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(work())
        except BaseException:
            os._exit(99)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    pytest.fail("the forked child hangs")


def test_fork_with_everything_in_use(tools, counter):
    plan, y = counter
    box, call = Box(), plan.submit(4)
    service = plan.serve(**box.arguments)

    def child():
        starts = [
            lambda: plan.run(4),
            lambda: plan.submit(4),
            call.submit,
            call.wait,
            service.start,
            service.stop,
            lambda: plan.scratch(4, 0, 0, 0, 0, 2),
        ]
        return sum("before fork()" not in tell(start) for start in starts)

    assert in_child(child) == 0
    call.wait()
    box.ask(1, T=4)
    box.wait(1)
    service.stop()
    assert (y == 2).all()


def test_a_child_may_drop_engines_and_make_new_ones(tools):
    lab = tools.Lab(tools.ISAS[0], torch.float32, 2)
    x, y = lab.randn(3, 64), lab.out(3, 64)
    things = [tools.native.Engine(2, isa=lab.isa)]
    things.append(tools.native.Plan(things[0]))
    things[1].add("cpu.copy", [lab.tok(x), lab.tok(y)])
    box = Box()
    things += [things[1].submit(3), things[1].serve(**box.arguments)]

    def child():
        things.clear()
        gc.collect()
        y.zero_()
        plan = tools.native.Plan(tools.native.Engine(2, isa=lab.isa))
        plan.add("cpu.copy", [lab.tok(x), lab.tok(y)])
        plan.submit(3).wait()
        return 0 if torch.equal(x, y) else 1

    assert in_child(child) == 0


def test_the_callers_affinity_is_left_alone(counter):
    before = os.sched_getaffinity(0)
    counter[0].run(4)
    assert os.sched_getaffinity(0) == before
