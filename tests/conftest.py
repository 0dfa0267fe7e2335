"""What every test shares: fixed seeds, two threads, no network, no writes to the user's cache."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

REPO = Path(__file__).resolve().parent.parent
MODELS = {
    "tiny-deepseek-v2": REPO / "examples" / "models" / "tiny-deepseek-v2",
    "tiny-qwen3-moe": REPO / "tests" / "models" / "tiny-qwen3-moe",
}

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is imported, by a conftest below too

hypothesis.settings.register_profile("ktgraph", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ktgraph")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write what passes make into golden files"
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(min(2, os.cpu_count() or 1))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {
        "gpu": None if torch.cuda.is_available() else "no CUDA device here",
        "amx": None if _has_amx() else "this CPU has no AMX tiles",
    }
    for item in items:
        for mark, reason in missing.items():
            if reason and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


def _has_amx() -> bool:
    try:
        return " amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache folder for the whole session, so that the machine is measured at most once."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files (tests/golden.py) are written instead of compared."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session")
def tiny_deepseek() -> Path:
    """Folder of the trained 18M DeepSeek-V2-style model."""
    return MODELS["tiny-deepseek-v2"]


@pytest.fixture(scope="session")
def tiny_qwen() -> Path:
    """Folder of the trained Qwen3-MoE-style model."""
    return MODELS["tiny-qwen3-moe"]


@pytest.fixture(scope="session")
def eval_text() -> str:
    """About 100 KB of fiction that the tiny models were not trained on, for perplexity."""
    return (REPO / "tests" / "models" / "eval_text.txt").read_text(encoding="utf-8")


class Poison:
    """Hands out tensors whose padding, and unwritten contents, are poisoned.

    Each tensor lies between two guard zones filled with NaN (or the largest integer), so a kernel
    that reads past an edge shows NaN in its result, and one that writes past it fails `check`.
    """

    GUARD = 256  # elements on either side

    def __init__(self) -> None:
        self._guarded: list[tuple[torch.Tensor, torch.Tensor]] = []

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An output buffer: contents poisoned as well, so an element never written shows."""
        count = int(np.prod(shape))
        whole = torch.full((count + 2 * self.GUARD,), self._value(dtype), dtype=dtype)
        self._guarded.append((whole, whole.clone()))
        return whole[self.GUARD : self.GUARD + count].view(*shape)

    def around(self, values: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of `values` between guard zones."""
        return self.empty(*values.shape, dtype=values.dtype).copy_(values)

    def check(self) -> None:
        """Raises AssertionError if a guard zone was written to."""
        for whole, before in self._guarded:
            for zone in (slice(None, self.GUARD), slice(-self.GUARD, None)):
                now, then = whole[zone].view(torch.uint8), before[zone].view(torch.uint8)
                assert torch.equal(now, then), (
                    f"a kernel wrote outside its {whole.dtype} buffer of "
                    f"{whole.numel() - 2 * self.GUARD} elements"
                )

    @staticmethod
    def _value(dtype: torch.dtype) -> float:
        return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max


@pytest.fixture
def poison() -> Iterator[Poison]:
    """Poisoned buffers (see `Poison`); their guard zones are checked when the test ends."""
    buffers = Poison()
    yield buffers
    buffers.check()
