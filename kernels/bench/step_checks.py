"""Steps of a small decoder: prefills with adapters, adapters that arrive and move, the probe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from decode_step import BLOCK, DecodeStep
from engine_run import capture_on
from lorad_kernels import AdapterFactors, group_rows, reference
from report import Report, only
from torch import Tensor

from lorad.adapters.weights import AdapterWeights, LinearFactors
from lorad.engine.decode_graphs import DecodeGraphs
from lorad.engine.delta_check import check_deltas
from lorad.engine.eager_steps import EagerSteps
from lorad.engine.step_inputs import StepInputs
from lorad.memory.adapter_pool import factors_at
from lorad.memory.slab import Slab
from lorad.memory.upload import Upload, Uploader
from lorad.model.decoder import Decoder
from lorad.sizing.adapter_size import pack_adapter, uniform_modules
from lorad.sizing.memory_plan import page_bytes, pages_for
from lorad.sizing.model_shape import ModelShape

GAP = 5  # free pages below the adapter: fewer than it has, so that it moves onto itself
KV_PAGES = 40
LATE = 10**8  # cycles of a GPU before an upload begins: some 50 ms, longer than a step
PROBE = tuple(range(3, 20))


def check_decoder(report: Report, decoder: Decoder) -> None:
    """A decode step in float32: the device's ops against the reference, adapters mixed."""
    step = DecodeStep.prepare(decoder, 48, 6, [1, 8, 3])
    batch = step.batch(6, 3)
    ours = decoder.forward(batch, step.kv)
    with only(reference):
        want = decoder.forward(batch, step.kv)
    _near(report, ours, want, "decoder against reference ops")


def check_prefills(report: Report, decoder: Decoder) -> None:
    """One step of decodes, short prompts and long ones, with adapters and without, in float32."""
    scene = _Scene.of(decoder, ranks=(8, 64))
    adapters = [scene.factors(0), scene.factors(1)]
    step = _step(
        [(1, 40), (1, 7), (3, 20), (70, 70), (70, 150), (66, 66)],
        [0, None, 1, 1, 0, None],
        adapters,
        scene.kv_pages,
    )
    ours, _ = scene.eager.run(step)
    with only(reference):
        want, _ = EagerSteps(decoder, scene.slab).run(step)
    _near(report, ours, want, "prefills against reference ops")


def check_memory(report: Report, decoder: Decoder) -> None:
    """Steps with an adapter that still arrives, and with one and with K and V that have moved.

    They must have the bits of steps with all in its place, eager and captured.
    """
    scene = _Scene.of(decoder, ranks=(64,))
    adapter = scene.factors(0)
    mixed = _step([(1, 40), (70, 150)], [0, 0], [adapter], scene.kv_pages)
    decodes = _step([(1, 40), (1, 33), (1, 5)], [None, 0, 0], [adapter], scene.kv_pages)
    for kind, run, step in (
        ("eager", scene.eager.run, mixed),
        ("captured", scene.graphs().run, decodes),
    ):
        want = run(step)[0].clone()
        upload = scene.upload_late(0)
        got = run(replace(step, arriving=(upload,)))[0]
        report.check(torch.equal(got, want), f"{kind} step with an adapter that arrives")
        scene.upload_late(0)
        got = run(scene.move(step))[0]
        report.check(torch.equal(got, want), f"{kind} step after a move")
        scene.place(0)


def check_probe(report: Report, decoder: Decoder) -> None:
    """The probe that a promotion makes, against the factors; it raises where they differ."""
    scene = _Scene.of(decoder, ranks=(8, 64))
    shape = decoder.config.shape
    for index, weights in enumerate(scene.weights):
        recorded = scene.eager.probe(scene.factors(index), PROBE)
        found = check_deltas(recorded, _linears(weights, shape), shape)
        complete = found.modules == shape.num_layers * len(shape.linears)
        report.check(complete, f"probe {decoder.dtype}: {found.modules} modules")


def _near(report: Report, ours: Tensor, want: Tensor, what: str) -> None:
    error = ((ours - want).abs().max() / want.abs().max()).item()
    report.check(error < 1e-4, f"{what}: error {error:.2g}")


@dataclass(frozen=True)
class _Scene:
    """A slab: a gap, adapters, then pages of K and V of which half are spare."""

    decoder: Decoder
    slab: Slab
    weights: list[AdapterWeights]  # on the host
    first_pages: list[int]
    eager: EagerSteps
    uploader: Uploader

    @classmethod
    def of(cls, decoder: Decoder, ranks: Sequence[int]) -> _Scene:
        shape, dtype, device = decoder.config.shape, decoder.dtype, decoder.device
        page = page_bytes(shape, BLOCK, dtype.itemsize)
        weights = [_weights(shape, rank, dtype, device) for rank in ranks]
        sizes = [pages_for(one.layout.nbytes, page) for one in weights]
        starts = list(accumulate(sizes, initial=GAP))
        pages = starts[-1] + 2 * KV_PAGES
        slab = Slab.allocate(shape, pages, BLOCK, dtype, device, scratch_page=True)
        slab.data.normal_()
        eager = EagerSteps(decoder, slab)
        scene = cls(decoder, slab, weights, starts[:-1], eager, Uploader(device))
        for index in range(len(ranks)):
            scene.place(index)
        return scene

    @property
    def kv_pages(self) -> range:
        return range(self.slab.num_pages - KV_PAGES, self.slab.num_pages)

    def graphs(self) -> DecodeGraphs:
        return DecodeGraphs(
            self.decoder,
            self.slab,
            max_num_seqs=4,
            max_model_len=256,
            max_lora_rank=64,
            capture=capture_on(self.decoder.device),
        )

    def factors(self, index: int, pages_down: int = 0) -> AdapterFactors:
        first = self.first_pages[index] - pages_down
        return factors_at(self.weights[index].layout, first * self.slab.page_elements)

    def place(self, index: int) -> None:
        """Copy an adapter to its pages, and wait for it."""
        self._place(index).copy_(self.weights[index].data)

    def upload_late(self, index: int) -> Upload:
        """NaN to where an adapter lies, and after a while its copy: too late for a hasty step."""
        self._place(index).fill_(torch.nan)
        if self.decoder.device.type == "cuda":
            with torch.cuda.stream(self.uploader._stream):
                torch.cuda._sleep(LATE)
        weights = self.weights[index]
        return self.uploader.start(self._place(index), weights.data, weights.layout)

    def move(self, step: StepInputs) -> StepInputs:
        """The first adapter slides down over the gap, K and V go to the spare pages."""
        self.uploader.join()
        first = self.first_pages[0]
        count = pages_for(self.weights[0].layout.nbytes, self.slab.page_bytes)
        self.slab.move_run(first, first - GAP, count)
        pages = sorted({page for table in step.block_tables for page in table})
        moved = {page: page - KV_PAGES for page in pages}
        self.slab.copy_pages(list(moved), list(moved.values()))
        return replace(
            step,
            kv_pages=[moved[page] for page in step.kv_pages],
            block_tables=[[moved[page] for page in table] for table in step.block_tables],
            adapters=[self.factors(0, GAP)],
        )

    def _place(self, index: int) -> Tensor:
        start = self.first_pages[index] * self.slab.page_elements
        return self.slab.data[start : start + self.weights[index].data.numel()]


def _weights(
    shape: ModelShape, rank: int, dtype: torch.dtype, device: torch.device
) -> AdapterWeights:
    modules = uniform_modules(shape, tuple(shape.linears), rank, scaling=0.5)
    layout = pack_adapter(shape, modules, dtype.itemsize)
    data = torch.randn(layout.nbytes // dtype.itemsize).mul_(rank**-0.5).to(dtype)
    if device.type == "cuda":
        data = data.pin_memory()  # else the copies would wait for the host, and none be late
    return AdapterWeights(f"sha256:{rank}", layout, data)


def _linears(weights: AdapterWeights, shape: ModelShape) -> Iterator[LinearFactors]:
    """What the adapter's files would say."""
    for layer, projections in enumerate(weights.layout.slices):
        for projection, places in zip(shape.projections, projections, strict=True):
            for part, at in zip(projection.slices, places, strict=True):
                a = weights.data[at.a_offset :][: at.rank * projection.in_features]
                b = weights.data[at.b_offset :][: part.out_features * at.rank]
                path = f"model.layers.{layer}.{projection.parent}.{part.leaf}"
                yield LinearFactors(
                    path, at.scaling, a.view(at.rank, -1), b.view(part.out_features, -1)
                )


def _step(
    sequences: Sequence[tuple[int, int]],
    slots: Sequence[int | None],
    adapters: list[AdapterFactors],
    pages: Sequence[int],
) -> StepInputs:
    """Sequences of (new rows, context), decodes first; their K and V lie in `pages`, in order."""
    free = iter(pages)
    tables = [[next(free) for _ in range(-(-context // BLOCK))] for _, context in sequences]
    places = [
        (table[position // BLOCK], position)
        for (count, context), table in zip(sequences, tables, strict=True)
        for position in range(context - count, context)
    ]
    counts = [count for count, _ in sequences]
    starts = list(accumulate(counts, initial=0))
    return StepInputs(
        token_ids=[(31 * row + 5) % 97 for row in range(len(places))],
        positions=[position for _, position in places],
        kv_pages=[page for page, _ in places],
        kv_offsets=[position % BLOCK for _, position in places],
        query_starts=starts,
        context_lens=[context for _, context in sequences],
        block_tables=tables,
        logits_rows=[end - 1 for end in starts[1:]],
        segments=group_rows(slots, counts),
        adapters=adapters,
    )
