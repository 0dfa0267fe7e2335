"""Where the kernels of these tests run: on a GPU where there is one, else in Triton's interpreter.

tests/conftest.py sets TRITON_INTERPRET before any kernel is imported.
"""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
