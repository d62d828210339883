"""Captured decode steps on the CPU, where a replay is a call on the fixed buffers.

What only a GPU can show, that a recorded graph repeats these calls, is in gpu_check.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from lorad_kernels import captures, cpu_linear

from lorad.engine import build
from lorad.engine.decode_graphs import KEPT_ON_CPU, Capture, CudaCapture, DecodeGraphs, as_it_is
from lorad.engine.eager_steps import EagerSteps
from lorad.engine.step_inputs import StepInputs
from lorad.errors import LoradError
from lorad.memory.slab import Slab
from lorad.model.config import ModelConfig
from lorad.model.loader import load_decoder
from lorad.sizing.families import llama_like
from lorad.sizing.graph_memory import MAX_GRAPH_ROWS, graph_buffer_bytes, graph_rows
from lorad.sizing.model_shape import read_config

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PAGES = 12


@pytest.fixture(scope="module")
def adapters(tiny_model, random_adapter, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    made = {
        f"r{rank}": random_adapter(tiny_model("llama"), root / str(rank), rank, targets, seed=rank)
        for rank, targets in ((1, LINEARS), (3, ("q_proj",)), (16, LINEARS), (64, LINEARS))
    }
    return {f"{name}-{i}": path for name, path in made.items() for i in range(3)}


@pytest.fixture
def compared(monkeypatch) -> list[int]:
    """Engines capture, and every captured step is run eagerly too; sizes of those compared."""
    monkeypatch.setattr(build, "_capture", lambda options, config, device: as_it_is)
    captured, sizes = DecodeGraphs.run, []

    def both(self, step):
        logits, tokens = (tensor.clone() for tensor in captured(self, step))
        want, want_tokens = EagerSteps(self._decoder, self._slab).run(step)
        assert torch.equal(tokens, want_tokens)
        # Bit for bit, but for matmuls that choose another kernel at another batch size.
        assert torch.allclose(logits, want, rtol=0, atol=4e-6 * float(want.abs().max()))
        sizes.append(len(tokens))
        return logits, tokens

    monkeypatch.setattr(DecodeGraphs, "run", both)
    return sizes


def test_every_batch_size_with_adapters_of_any_rank(tiny_model, sync_engine, adapters, compared):
    """32 sequences of which one ends in each step; contexts cross the borders of blocks."""
    names = [None, *adapters]
    rows = [(list(range(5, 6 + i % 19)), names[i * 5 % 13]) for i in range(32)]
    engine = sync_engine(tiny_model("llama"), adapters, max_num_seqs=32, max_model_len=128)
    engine.generate([([5], name) for name in adapters], max_tokens=1)  # all are loaded
    for i, (prompt, adapter) in enumerate(rows):
        engine.add(str(i), prompt, adapter, max_tokens=3 + i)
    outputs = engine.run()
    assert {len(outputs[str(i)]) - i for i in range(32)} == {3}
    assert set(range(1, 33)) <= set(compared)


@pytest.mark.parametrize("family", ["mistral", "qwen3", "qwen2"])
def test_windows_head_norms_and_base_rows(tiny_model, sync_engine, compared, family):
    engine = sync_engine(tiny_model(family), max_num_seqs=3, max_model_len=64)
    engine.generate([(list(range(5, 20)), None), ([7], None), ([9, 4], None)], max_tokens=20)
    assert len(compared) >= 18


def test_adapters_that_come_go_and_move(tiny_model, sync_engine, adapters, compared):
    """Few pages: adapters are evicted, loaded elsewhere and moved between the steps."""
    names = list(adapters)
    rows = [([5, 6, i % 5 + 10], names[7 * i % 12]) for i in range(24)]
    page = 16 * 2 * 2 * 32 * 4
    options = {"max_model_len": 64, "max_loras": 3, "max_num_seqs": 4, "slab_bytes": 150 * page}
    tight = sync_engine(tiny_model("llama"), adapters, **options)
    answers = tight.generate(rows, max_tokens=8)
    alone = sync_engine(tiny_model("llama"), adapters, max_num_seqs=1, max_model_len=64)
    assert answers == [alone.generate([row], max_tokens=8)[0] for row in rows]
    assert tight.built.engine.stats().memory.evictions


def test_steps_that_are_not_served_are_eager(tiny_model, sync_engine, adapters, compared):
    """A rank above the captured one, and prefills."""
    model = tiny_model("llama")
    engine = sync_engine(model, adapters, max_num_seqs=2, max_lora_rank=32, max_model_len=64)
    engine.generate([([5, 6, 7], "r64-0")], max_tokens=4)
    assert compared == []
    engine.generate([([5, 6, 7], "r16-0")], max_tokens=4)
    assert compared == [1, 1, 1]


def test_sampling_reads_the_captured_logits(tiny_model, sync_engine, monkeypatch):
    rows = [([5, 6, 7], None), ([9, 4], None)]
    options = {"max_tokens": 12, "temperature": 1.0, "seed": 3}
    want = sync_engine(tiny_model("llama"), max_num_seqs=3).generate(rows, **options)
    monkeypatch.setattr(build, "_capture", lambda *_: as_it_is)
    assert sync_engine(tiny_model("llama"), max_num_seqs=3).generate(rows, **options) == want


def graphs_of(
    model: Path, rows: int, scratch_page: bool = True, capture: Capture = as_it_is
) -> tuple[DecodeGraphs, Slab]:
    config = ModelConfig.from_config(read_config(model))
    device = torch.device("cpu")
    decoder = load_decoder(model, config, dtype=torch.float32, device=device, max_positions=64)
    slab = Slab.allocate(config.shape, PAGES, 16, torch.float32, device, scratch_page=scratch_page)
    slab.data[: PAGES * slab.page_elements].fill_(torch.nan)
    graphs = DecodeGraphs(
        decoder, slab, max_num_seqs=rows, max_model_len=64, max_lora_rank=8, capture=capture
    )
    return graphs, slab


def decode(tokens: list[int], pages: list[int]) -> StepInputs:
    count = len(tokens)
    return StepInputs(
        token_ids=tokens,
        positions=[0] * count,
        kv_pages=pages,
        kv_offsets=[0] * count,
        query_starts=list(range(count + 1)),
        context_lens=[1] * count,
        block_tables=[[page] for page in pages],
        logits_rows=list(range(count)),
        segments=None,
        adapters=[],
    )


def test_padding_writes_to_the_page_of_nobody(tiny_model):
    graphs, slab = graphs_of(tiny_model("llama"), 8)
    step = decode([5, 6, 7, 8, 9], [3, 0, 11, 4, 5])
    assert graphs.serves(step)
    logits, tokens = graphs.run(step)
    assert logits.shape == (5, 256)
    assert logits.isfinite().all() and (tokens >= 0).all()
    pages = slab.data.view(PAGES + 1, -1)
    written = pages.isfinite().any(1).nonzero().flatten().tolist()
    assert written == [0, 3, 4, 5, 11, slab.scratch_page] == [0, 3, 4, 5, 11, PAGES]
    # One token of a page, in every layer's K and V.
    assert int(pages[3].isfinite().sum()) * 16 == slab.page_elements


def run_at_capture(run, into):
    """As CUDA's capture does: the step is run once, over what is in the buffers by then."""
    run()
    return as_it_is(run, into)


def test_a_capture_on_demand_runs_over_padding(tiny_model):
    """The pages of the last step may be an adapter's when another size is first needed."""
    graphs, slab = graphs_of(tiny_model("llama"), 8, capture=run_at_capture)
    want, _ = graphs_of(tiny_model("llama"), 8)
    pages = slab.data.view(PAGES + 1, -1)
    for tokens, used in (([5, 6, 7, 8, 9], [3, 0, 11, 4, 5]), ([5], [7]), ([9, 4], [8, 9])):
        pages[:PAGES].fill_(torch.nan)
        step = decode(tokens, used)
        assert graphs.serves(step)
        assert not pages[:PAGES].isfinite().any()
        for got, expected in zip(graphs.run(step), want.run(step), strict=True):
            assert torch.equal(got, expected)
        assert pages.isfinite().any(1).nonzero().flatten().tolist() == [*sorted(used), PAGES]


def test_a_capture_on_demand_adds_no_delta(tiny_model, sync_engine, adapters, monkeypatch):
    """Engines whose captures run the step give the answers of those whose captures do not."""
    names = [None, *adapters]
    rows = [(list(range(5, 6 + i % 19)), names[i * 5 % 13]) for i in range(9)]
    answers = []
    for capture in (as_it_is, run_at_capture):
        monkeypatch.setattr(build, "_capture", lambda *_, capture=capture: capture)
        monkeypatch.setattr(DecodeGraphs, "capture_all", lambda self: None)
        engine = sync_engine(tiny_model("llama"), adapters, max_num_seqs=9, max_model_len=64)
        for i, (prompt, adapter) in enumerate(rows):
            engine.add(str(i), prompt, adapter, max_tokens=3 + i)
        outputs = engine.run()
        answers.append({key: [o.token_id for o in tokens] for key, tokens in outputs.items()})
    assert answers[0] == answers[1]


class FakeStream:
    """Counts the streams that are made, and knows which is current."""

    made = 0
    current = None

    def __init__(self, device: object = None) -> None:
        FakeStream.made += 1

    def wait_stream(self, other: FakeStream) -> None: ...

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        before, FakeStream.current = FakeStream.current, self
        yield
        FakeStream.current = before


def test_all_captures_are_on_one_stream(monkeypatch):
    """For each stream that it is used on, cuBLAS keeps a workspace."""
    monkeypatch.setattr(FakeStream, "made", 0)
    cuda = {
        "Stream": FakeStream,
        "current_stream": lambda device: Mock(),
        "stream": FakeStream.entered,
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": object,
        "graph": lambda graph, pool, stream, capture_error_mode: stream.entered(),
    }
    for name, double in cuda.items():
        monkeypatch.setattr(torch.cuda, name, double)
    capture, streams = CudaCapture(torch.device("cuda")), []

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        streams.append(FakeStream.current)
        return torch.zeros(1), torch.zeros(1)

    for _ in range(3):
        capture(step, step())
    assert FakeStream.made == 1
    used = [stream for stream in streams if stream is not None]
    assert len(used) == 6 and len(set(map(id, used))) == 1


def test_what_nan_a_row_reads_is_its_own(tiny_model):
    graphs, _ = graphs_of(tiny_model("llama"), 4)
    step = decode([5, 6, 7], [0, 1, 2])
    broken = dataclasses.replace(step, positions=[0, 1, 0], kv_offsets=[0, 1, 0])
    logits, tokens = graphs.run(dataclasses.replace(broken, context_lens=[1, 2, 1]))
    assert tokens[1] == -1 and (tokens[[0, 2]] >= 0).all()
    assert logits[[0, 2]].isfinite().all()


def test_more_rows_than_were_captured_are_not_served(tiny_model):
    graphs, _ = graphs_of(tiny_model("llama"), 2)
    assert not graphs.serves(decode([5, 6, 7], [0, 1, 2]))
    prompt = dataclasses.replace(decode([5], [0]), token_ids=[5, 6], positions=[0, 1])
    assert not graphs.serves(prompt)
    with pytest.raises(ValueError, match="no page"):
        graphs_of(tiny_model("llama"), 2, scratch_page=False)


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_buffers_take_the_bytes_that_are_planned(tiny_model, rows):
    graphs, slab = graphs_of(tiny_model("llama"), rows)
    shape = read_config(tiny_model("llama"))
    arch = llama_like(ModelConfig.from_config(shape).shape)
    assert graphs.nbytes == graph_buffer_bytes(arch, rows, 64, 16, 4)
    assert slab.data.nbytes == (PAGES + 1) * slab.page_bytes
    graphs.capture_all()
    assert graphs.count == min(2 * len(graph_rows(rows)), KEPT_ON_CPU)


def test_captured_batch_sizes():
    assert graph_rows(1) == (1,)
    assert graph_rows(20) == (1, 2, 4, 8, 16, 20)
    assert graph_rows(64) == (1, 2, 4, *range(8, 65, 8))
    assert graph_rows(4096)[-1] == MAX_GRAPH_ROWS
    assert all(list(graph_rows(n)) == sorted(set(graph_rows(n))) for n in range(1, 600))


def test_what_cannot_be_captured(tiny_model, sync_engine, monkeypatch):
    assert captures(torch.device("cpu"), 64) and not captures(torch.device("cpu"), 20)
    assert captures(torch.device("cuda"), 256) and not captures(torch.device("cuda"), 257)
    assert not captures(torch.device("meta"), 64)

    def full(run, into):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(build, "_capture", lambda *_: full)
    with pytest.raises(LoradError, match="captured: CUDA out of memory") as error:
        sync_engine(tiny_model("llama"))
    assert error.value.code == "memory.no_capacity"
    assert "engine.cuda_graphs = false" in error.value.hint


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (RuntimeError("Failed to find C compiler. Please specify via CC"), "gcc"),
        (subprocess.CalledProcessError(1, ["gcc", "driver.c"]), "Python's headers"),
        (
            torch.AcceleratorError("CUDA error: operation not permitted\nadvice"),
            "cuda_graphs = false",
        ),
    ],
)
def test_a_capture_that_fails_ends_the_start_with_what_to_do(
    error, hint, tiny_model, sync_engine, monkeypatch
):
    def fails(run, into):
        raise error

    monkeypatch.setattr(build, "_capture", lambda *_: fails)
    with pytest.raises(LoradError, match="the decode steps cannot be captured: ") as ended:
        sync_engine(tiny_model("llama"))
    assert (ended.value.code, ended.value.kind.exit_code) == ("engine.failed", 10)
    assert hint in ended.value.hint
    assert "advice" not in ended.value.message


def test_a_cpu_captures_nothing_at_the_start(tiny_model, sync_engine, caplog):
    caplog.set_level(logging.INFO)
    sync_engine(tiny_model("llama"), cuda_graphs=True)
    assert "captured" not in caplog.text


def test_a_cpu_records_steps_of_its_own_kernels(tiny_model, sync_engine, adapters, monkeypatch):
    """In bfloat16 a recorded step gives the tokens of one that is queued anew."""
    monkeypatch.setattr(cpu_linear, "_fastest", lambda group, rows: cpu_linear.few_rows)
    rows = [([5, 6, 7], None), ([9, 4, 1, 2], "r16-0"), ([3], "r3-1")]
    served: list[bool] = []
    run = DecodeGraphs.run
    monkeypatch.setattr(DecodeGraphs, "run", lambda *args: served.append(True) or run(*args))
    options = {"max_num_seqs": 4, "dtype": "bfloat16"}
    recorded = sync_engine(tiny_model("llama"), adapters, **options).generate(rows, max_tokens=24)
    assert len(served) >= 20
    monkeypatch.setattr(build, "_capture", lambda *_: None)
    queued = sync_engine(tiny_model("llama"), adapters, **options)
    assert queued.generate(rows, max_tokens=24) == recorded
