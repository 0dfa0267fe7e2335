"""CPUs and memory nodes, of this machine and of others laid out as files; slices of weights."""

import os

import numpy as np
import pytest


class Machine:
    """Files of a simulated machine below a folder."""

    def __init__(self, root):
        self.root = root
        self.write("proc/self/cgroup", "0::/a/b\n")
        self.write("sys/fs/cgroup/cgroup.controllers", "cpu cpuset\n")

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def cpus(self, online, cores, nodes, allowed=""):
        """cores: lists of sibling CPUs; nodes: CPU list text by node number."""
        self.write("sys/devices/system/cpu/online", online + "\n")
        for core in cores:
            for cpu in core:
                text = ",".join(map(str, core)) + "\n"
                name = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
                self.write(name, text)
        for number, text in nodes.items():
            self.write(f"sys/devices/system/node/node{number}/cpulist", text + "\n")
        if allowed:
            self.write("proc/self/status", f"Name:\tx\nCpus_allowed_list:\t{allowed}\n")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def two_sockets(machine, **kwargs):
    """Two nodes of four cores with two threads each; numbered as Linux does on Xeons."""
    cores = [(c, c + 8) for c in range(8)]
    machine.cpus("0-15", cores, {0: "0-3,8-11", 1: "4-7,12-15"}, **kwargs)


def test_two_nodes_with_hyper_threads(tools, machine):
    two_sockets(machine)
    t = tools.native.topology(str(machine.root))
    assert t["nodes"] == [0, 1]
    assert t["quota"] == 0.0
    assert t["cpus"][:2] == [(0, 0, 0), (1, 1, 0)]
    assert t["cpus"][12] == (12, 4, 1)
    order = tools.native.default_cpus(str(machine.root))
    assert order == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]


def test_siblings_numbered_side_by_side(tools, machine):
    cores = [(2 * c, 2 * c + 1) for c in range(4)]
    machine.cpus("0-7", cores, {0: "0-7"})
    assert tools.native.default_cpus(str(machine.root)) == [0, 2, 4, 6, 1, 3, 5, 7]


def test_offline_cpus_are_left_out(tools, machine):
    two_sockets(machine)
    machine.write("sys/devices/system/cpu/online", "0,2-9,12-15\n")  # 1, 10 and 11 are off
    order = tools.native.default_cpus(str(machine.root))
    assert order == [0, 4, 2, 5, 3, 6, 9, 7, 8, 12, 13, 14, 15]  # 9 is the first of its core


def test_affinity(tools, machine):
    two_sockets(machine, allowed="3,11,12-13")
    t = tools.native.topology(str(machine.root))
    assert [c[0] for c in t["cpus"]] == [3, 11, 12, 13]
    assert tools.native.default_cpus(str(machine.root)) == [3, 12, 13, 11]


def test_only_the_second_node(tools, machine):
    two_sockets(machine, allowed="4-7")
    t = tools.native.topology(str(machine.root))
    assert t["nodes"] == [1]
    assert t["cpus"][0] == (4, 4, 1)


def test_cpuset_of_a_group_above(tools, machine):
    two_sockets(machine)
    machine.write("sys/fs/cgroup/a/cpuset.cpus.effective", "0-1,4,8\n")
    machine.write("sys/fs/cgroup/a/b/cpuset.cpus.effective", "0-1,4,8\n")
    assert tools.native.default_cpus(str(machine.root)) == [0, 4, 1, 8]


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 16),
        ({"sys/fs/cgroup/a/b/cpu.max": "300000 100000\n"}, 3),
        ({"sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 3),  # of the group above; rounded
        ({"sys/fs/cgroup/a/cpu.max": "500000 100000\n", "sys/fs/cgroup/cpu.max": "2000 1000\n"}, 2),
        ({"sys/fs/cgroup/a/b/cpu.max": "10000 100000\n"}, 1),
    ],
)
def test_quota(tools, machine, files, count):
    two_sockets(machine)
    for path, text in files.items():
        machine.write(path, text)
    assert len(tools.native.default_cpus(str(machine.root))) == count


def test_quota_of_version_1(tools, machine):
    two_sockets(machine)
    machine.write("proc/self/cgroup", "3:cpu,cpuacct:/x/y\n2:memory:/x\n")
    machine.write("sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us", "400000\n")
    machine.write("sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us", "100000\n")
    assert tools.native.topology(str(machine.root))["quota"] == 4.0
    assert tools.native.default_cpus(str(machine.root)) == [0, 4, 1, 5]


def test_memory_only_nodes_have_no_threads(tools, machine):
    two_sockets(machine)
    machine.write("sys/devices/system/node/node2/cpulist", "\n")
    assert tools.native.topology(str(machine.root))["nodes"] == [0, 1]


def test_a_machine_that_says_nothing(tools, machine):
    assert tools.native.default_cpus(str(machine.root)) == [0]


def test_this_machine(tools):
    t, order = tools.native.topology(), tools.native.default_cpus()
    assert {c[0] for c in t["cpus"]} == os.sched_getaffinity(0)
    assert set(order) <= os.sched_getaffinity(0)
    e = tools.native.Engine(0)
    assert e.cpus == order
    assert set(e.nodes) <= set(t["nodes"])


def test_nodes_of_an_engine(tools):
    native = tools.native
    assert native.Engine(4, nodes=[3, 1, 3, 1]).nodes == [1, 3]
    with pytest.raises(ValueError, match="3 nodes given for 2 threads"):
        native.Engine(2, nodes=[0, 1, 0])
    with pytest.raises(ValueError, match="at most 16 memory nodes, got 17"):
        native.Engine(17, nodes=list(range(17)))


# slices of packed stacks


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("fmt", "group", "gate_up"), [("f32", 0, False), ("int8", 0, True), ("int4", 32, False)]
)
def test_slices_cover_a_stack(tools, fmt, group, gate_up, nodes):
    shape = {"rows": 418, "cols": 130, "group": group, "count": 3, "gate_up": gate_up}
    slices = tools.native.node_slices(fmt, **shape, nodes=nodes)
    at = 0
    for begin, end, node in slices:
        assert begin == at < end
        assert 0 <= node < nodes
        at = end
    assert at == tools.native.packed_nbytes(fmt, 418, 130, group, 3, gate_up)
    share = np.bincount([n for *_, n in slices], [e - b for b, e, _ in slices])
    # Seven groups of tiles among five nodes: one or two each; 64 bytes a matrix of padding.
    assert share.max() <= share.min() * 2 + 3 * 64


def test_slices_begin_at_groups_of_tiles(tools):
    stride = tools.native.packed_nbytes("int8", 160, 64)  # 10 tiles of 1 KiB, then the scales
    slices = tools.native.node_slices("int8", 160, 64, 0, 2, False, nodes=2)
    want = [(0, 4096, 0), (4096, 10240, 1), (10240, 10496, 0), (10496, stride, 1)]
    assert slices == want + [(b + stride, e + stride, n) for b, e, n in want]


def test_few_tiles_among_many_nodes(tools):
    slices = tools.native.node_slices("bf16", 16, 8, nodes=4)
    assert {n for *_, n in slices} == {3}  # one group: the last node's


def test_place_on_this_machine(tools):
    native, shape = tools.native, ("int8", 1000, 512, 0, 4, False)
    nbytes = native.packed_nbytes(*shape[:3], count=4)
    data = native.empty_packed(nbytes)
    data[:] = np.arange(nbytes, dtype=np.uint8)
    (first, *_), address = native.topology()["nodes"], data.ctypes.data
    slices = native.node_slices(*shape, nodes=2)
    said = native.numa_place(address, nbytes, slices, [first, first])
    if said:
        assert "not allowed here" in said
        pytest.skip(said)
    assert native.numa_node_of(address) == first
    assert (data == np.arange(nbytes, dtype=np.uint8)).all()
    refused = native.numa_place(address, nbytes, slices, [first, 1000])
    assert refused.startswith("mbind to memory node 1000: there is no such node")
    assert (data == np.arange(nbytes, dtype=np.uint8)).all()


def test_place_refuses(tools):
    native = tools.native
    data = native.empty_packed(1 << 16)
    with pytest.raises(ValueError, match=r"\[0, 70000\) is outside the 65536 bytes"):
        native.numa_place(data.ctypes.data, data.size, [(0, 70000, 0)], [0])
    with pytest.raises(ValueError, match="slice of node 1, but 1 node numbers"):
        native.numa_place(data.ctypes.data, data.size, [(0, 70, 1)], [0])
