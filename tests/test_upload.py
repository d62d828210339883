"""Copies into the slab: at once on a CPU, on a stream of their own on CUDA."""

from __future__ import annotations

import pytest
import torch

from lorad.memory.upload import Uploader, pinned


def test_on_a_cpu_a_copy_is_done_when_it_returns():
    source, slab = torch.arange(8.0), torch.zeros(16)
    upload = Uploader(slab.device).start(slab[4:12], pinned(source, slab.device))
    assert upload.done
    assert torch.equal(slab[4:12], source)
    assert float(slab.sum()) == float(source.sum())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_it_follows_the_work_before_and_can_be_waited_for_without_the_host():
    device = torch.device("cuda")
    slab = torch.zeros(2**22, device=device)
    source = pinned(torch.ones(2**22), device)
    uploader = Uploader(device)
    torch.cuda._sleep(10**8)
    before = slab.sum()  # must read what was there before the copy
    upload = uploader.start(slab, source)
    assert not upload.done
    uploader.join()
    after = slab.sum()
    assert (float(before), float(after)) == (0.0, float(2**22))
    assert upload.done
