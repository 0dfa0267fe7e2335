"""Hand-overs: every word arrives, the flag is raised once, the reply is lowered."""

import time

import pytest
import torch

from ktgraph.triton_kernels import handover


def _shared(count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Memory that both sides see, poisoned."""
    made = torch.full((count,), -7, dtype=dtype)
    return made.pin_memory() if device.type == "cuda" else made


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_post_copies_all_and_raises_the_request(
    device: torch.device, tokens: int, dtype: torch.dtype
) -> None:
    hidden, top_k = 1032, 3
    rows = torch.randn(tokens, hidden).to(dtype).to(device)
    ids = torch.randint(64, (tokens, top_k), dtype=torch.int32).to(device)
    weights = torch.rand(tokens, top_k).to(device)
    sent = [rows, ids, weights]
    there = [_shared(x.numel(), device, x.dtype).view(x.shape) for x in sent]
    arrived = torch.zeros(1, dtype=torch.int32, device=device)
    request = _shared(1, device, torch.int32)
    for value in (1, 5):  # the counter is ready for the next time
        request.fill_(0)
        handover.post(sent, there, arrived, request, value)
        _wait(device)
        assert int(request) == value
        assert int(arrived) == 0
        assert all(torch.equal(t, s.cpu()) for t, s in zip(there, sent, strict=True))


def test_one_tensor_is_enough(device: torch.device) -> None:
    row = torch.randn(1, 6).to(device)
    there = _shared(6, device, torch.float32).view(1, 6)
    arrived = torch.zeros(1, dtype=torch.int32, device=device)
    request = _shared(1, device, torch.int32)
    handover.post([row], [there], arrived, request, 1)
    _wait(device)
    assert torch.equal(there, row.cpu())


def test_receive_copies_and_lowers_the_reply(device: torch.device) -> None:
    answer = _shared(2500, device, torch.float32)
    answer.copy_(torch.randn(2500))
    target = torch.full((2500,), float("nan"), device=device)
    arrived = torch.zeros(1, dtype=torch.int32, device=device)
    reply = _shared(1, device, torch.int32)
    reply.fill_(1)
    handover.receive(answer, target, arrived, reply)
    _wait(device)
    assert torch.equal(target.cpu(), answer)
    assert int(reply) == 0
    assert int(arrived) == 0


@pytest.mark.gpu
def test_receive_waits_for_the_reply(device: torch.device) -> None:
    answer = _shared(2500, device, torch.float32)
    target = torch.full((2500,), float("nan"), device=device)
    arrived = torch.zeros(1, dtype=torch.int32, device=device)
    reply = _shared(1, device, torch.int32)
    reply.fill_(0)
    handover.receive(answer, target, arrived, reply)
    ended = torch.cuda.Event()
    ended.record()
    time.sleep(0.02)
    assert not ended.query()
    answer.copy_(torch.randn(2500))
    reply.fill_(1)
    _wait(device)
    assert torch.equal(target.cpu(), answer)


def test_rows_of_half_words_are_refused(device: torch.device) -> None:
    row = torch.zeros(3, dtype=torch.bfloat16, device=device)
    words = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(AssertionError, match="words of 4 bytes, not 6 bytes"):
        handover.receive(row, row, words, words)
