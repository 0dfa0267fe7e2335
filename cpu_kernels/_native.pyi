"""The compiled engine (bindings.cpp). What each kernel takes: ``kernels()``."""

from typing import Any

from numpy import uint8
from numpy.typing import NDArray

class Tensor:
    """A strided view of f32, bf16 or i32 memory, rank 1 to 3, last stride 1.

    The first size may be -1 (tokens) or -2 (output rows); each run sets it.
    """

    def __init__(
        self, ptr: int, dtype: str, shape: list[int], strides: list[int] | None = None
    ) -> None: ...

class Weight:
    """A packed matrix, or a stack of `count`; the caller keeps the memory alive."""

    def __init__(
        self,
        format: str,
        rows: int,
        cols: int,
        count: int,
        group: int,
        gate_up: bool,
        data: int,
        nbytes: int,
        activations: str = "",
        many_rows: int = 0,
    ) -> None: ...

class State:
    """A paged cache; each part is [layer][page][page_size][row]."""

    def __init__(
        self,
        dtype: str,
        layers: int,
        pages: int,
        page_size: int,
        part_rows: list[int],
        parts: list[int],
    ) -> None: ...

class Batch:
    """Which token belongs to which sequence; all arrays are i32 and are copied."""

    def __init__(self) -> None: ...
    def set(
        self,
        tok_seq: Any,
        tok_pos: Any,
        seq_start: Any,
        kv_len: Any,
        block_table: Any,
        out_rows: Any,
    ) -> None: ...

class BatchMarker: ...

BATCH: BatchMarker

class Engine:
    """Persistent threads; the caller is one of them. threads=0: one per allowed CPU.

    While a run lasts, the caller is kept on cpus[0]. nodes: the memory node of each thread
    (default: as the system says).
    """

    def __init__(
        self,
        threads: int = 0,
        cpus: list[int] | None = None,
        isa: str = "",
        nodes: list[int] | None = None,
    ) -> None: ...
    @property
    def nodes(self) -> list[int]: ...
    @property
    def threads(self) -> int: ...
    @property
    def cpus(self) -> list[int]: ...
    @property
    def isa(self) -> str: ...

class Plan:
    """Instructions run as one region: every thread does its share, with barriers between."""

    def __init__(self, engine: Engine, max_tokens: int = 0, max_rows: int = 0) -> None: ...
    def add(
        self,
        kernel: str,
        operands: list[Tensor | Weight | State | BatchMarker | None],
        attrs: dict[str, int | float | str | bool] = ...,
    ) -> int: ...
    def run(self, T: int, O: int = 0, batch: Batch | None = None) -> None: ...
    def submit(self, T: int, O: int = 0, batch: Batch | None = None) -> Call:
        """Runs without the caller and without the GIL, after what was submitted before.

        The batch is copied; operands must stay alive until the call is done. Dropping the Call
        waits for it.
        """

    def prepare(self, T: int = 0, O: int = 0, batch: Batch | None = None, header: int = 0) -> Call:
        """A Call not yet submitted. header: address of int32 T and O, read as each run starts."""

    def serve(
        self,
        request: int,
        reply: int,
        header: int = 0,
        T: int = 0,
        O: int = 0,
        batch: Batch | None = None,
        spin_us: float = 200.0,
    ) -> Service:
        """A started Service with one mailbox; see Service.add."""

    def run_timed(self, T: int, O: int = 0, batch: Batch | None = None) -> list[float]: ...
    def scratch(
        self, T: int, O: int, sequences: int, max_new: int, max_kv: int, threads: int
    ) -> tuple[int, int]: ...
    def kernel(self, i: int) -> str: ...
    def __len__(self) -> int: ...

class Call:
    """A plan with its sizes, to run any number of times, one run at a time.

    `address` is the argument of the C functions `RUN_CALL`, `SUBMIT_CALL` and `WAIT_CALL` (fit for
    cudaLaunchHostFunc): run on the calling thread; queue and return; return when done.
    """

    def set(self, T: int = 0, O: int = 0, batch: Batch | None = None, header: int = 0) -> None:
        """Sizes of the runs to come; RuntimeError while one is pending."""

    def submit(self) -> None: ...
    def run(self) -> None:
        """On the calling thread; wait() tells whether it failed."""

    def done(self) -> bool: ...
    def wait(self) -> None:
        """Returns when the run is done; RuntimeError with what it failed with."""

    @property
    def address(self) -> int: ...

RUN_CALL: int
SUBMIT_CALL: int
WAIT_CALL: int

class Service:
    """A thread that watches mailboxes in memory and answers each request by running its plan.

    It spins for spin_us microseconds after the last request, then looks ever more rarely, down to
    once a millisecond.
    """

    def __init__(self, engine: Engine, spin_us: float = 200.0) -> None: ...
    def add(
        self,
        plan: Plan,
        request: int,
        reply: int,
        header: int = 0,
        T: int = 0,
        O: int = 0,
        batch: Batch | None = None,
    ) -> None:
        """request, reply: addresses of uint32 words, of header: int32 T and O (else as given).

        A request is a value in 1 .. 2**30 - 1; the service sets it back to 0, runs the plan, and
        writes the value to reply, plus REPLY_FAILED if this run or one before it failed.
        """

    def start(self) -> None: ...
    def stop(self) -> None:
        """Ends after the request being answered; RuntimeError as check()."""

    def check(self) -> None:
        """RuntimeError with the first failure since start()."""

    @property
    def running(self) -> bool: ...
    @property
    def served(self) -> int: ...
    @property
    def busy_seconds(self) -> float:
        """Time spent in the plans of answered requests."""

    def spans(self) -> list[tuple[int, int, int]]:
        """(mailbox, begin, end) of requests answered since the last call, oldest first.

        Nanoseconds of the steady clock (time.perf_counter_ns on Linux).  At most 1024 are kept, the
        oldest.  For one caller at a time.
        """

REPLY_FAILED: int

def packed_nbytes(
    format: str, rows: int, cols: int, group: int = 0, count: int = 1, gate_up: bool = False
) -> int: ...
def pack_into(
    dst: int,
    index: int,
    format: str,
    rows: int,
    cols: int,
    group: int,
    count: int,
    gate_up: bool,
    src: Any,
    isa: str = "",
) -> None: ...
def pack_ints_into(
    dst: int,
    index: int,
    format: str,
    rows: int,
    cols: int,
    group: int,
    count: int,
    gate_up: bool,
    q: Any,
    scales: Any,
    zeros: Any = None,
) -> None: ...
def repack_into(
    dst: int,
    index: int,
    format: str,
    rows: int,
    cols: int,
    group: int,
    count: int,
    gate_up: bool,
    blocks: NDArray[uint8],
) -> None: ...
def quantize(format: str, group: int, src: Any) -> tuple[NDArray[Any], NDArray[Any]]: ...
def unpack(
    src: int,
    index: int,
    format: str,
    rows: int,
    cols: int,
    group: int = 0,
    count: int = 1,
    gate_up: bool = False,
) -> NDArray[Any]: ...
def empty_packed(nbytes: int) -> NDArray[uint8]: ...
def isa_info() -> dict[str, Any]: ...
def default_cpus(root: str = "") -> list[int]:
    """CPUs in an Engine's order: one per core first, nodes in turn.

    root: a folder with another machine's /proc and /sys (for tests).
    """

def topology(root: str = "") -> dict[str, Any]:
    """cpus: (number, lowest CPU of its core, memory node); nodes; quota in CPUs, 0.0 is none."""

def node_slices(
    format: str,
    rows: int,
    cols: int,
    group: int = 0,
    count: int = 1,
    gate_up: bool = False,
    nodes: int = 1,
) -> list[tuple[int, int, int]]:
    """(begin, end, node) in bytes of a packed stack: each node's share of every matrix."""

def numa_place(
    address: int, nbytes: int, slices: list[tuple[int, int, int]], nodes: list[int]
) -> str:
    """Binds slices to memory nodes (by the system's numbers); '' or why the system refused."""

def numa_node_of(address: int) -> int:
    """Memory node of the page at an address that was touched; -1 when the system refuses."""

def kernels() -> dict[str, str]: ...

# limits.cpp
def touch(data: int, nbytes: int, threads: int) -> None: ...
def read_bandwidth(data: int, nbytes: int, threads: int, passes: int = 5) -> list[float]: ...
def arithmetic_units() -> list[str]: ...
def arithmetic_peak(unit: str, threads: int, seconds: float = 0.1) -> float: ...
