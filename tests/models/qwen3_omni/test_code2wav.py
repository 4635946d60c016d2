"""Pieces of a waveform, put together, are transformers' one-pass decode."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from itertools import chain, cycle

import pytest
import torch

from omnistage.ar.generation.causal_convs import CausalConvs
from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.models.qwen3_omni.code2wav import StreamedCode2Wav
from omnistage.models.qwen3_omni.code2wav_gate import check_against_one_pass
from tests.diffusion.graph_platform import GraphPlatform
from tests.models.qwen3_omni.loud_codec import (
    LOUD_RMS,
    REAL_SHAPE,
    TINY,
    loud_codec,
    one_pass,
    random_codes,
)

ALLOWED = 1e-5


@pytest.fixture(scope="module")
def tiny() -> StreamedCode2Wav:
    return StreamedCode2Wav(loud_codec(TINY), device="cpu", max_streams=4)


def in_pieces(model: StreamedCode2Wav, codes: torch.Tensor, sizes: Iterable[int]) -> torch.Tensor:
    """codes (B, T, G) in pieces of `sizes` frames, as long as there are any → (B, samples)."""
    streams = [model.begin(("r", index)) for index in range(len(codes))]
    sizes, at, waves = iter(sizes), 0, []
    while at < codes.shape[1]:
        piece = codes[:, at : at + next(sizes)]
        waves.append(torch.stack(model.decode(streams, piece, [piece.shape[1]] * len(codes))))
        at += piece.shape[1]
    waves += [torch.stack([model.finish(stream) for stream in streams])]
    for stream in streams:
        model.release(stream)
    return torch.cat(waves, dim=1)


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative to the peak, of a reference that is loud and not clipped."""
    assert wanted.pow(2).mean().sqrt() >= LOUD_RMS
    assert (wanted.abs() >= 1).float().mean() < 0.01
    assert found.shape == wanted.shape
    assert found.dtype == torch.float32
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.invariant("AR-INV-120")
@pytest.mark.parametrize(
    "sizes",
    [(1,), (3,), (4,), (25,), (300,), (4, 25), (1, 2, 40, 7, 1, 1, 13)],
    ids=lambda sizes: "-".join(map(str, sizes)),
)
def test_any_pieces_are_the_one_pass_decode(tiny, sizes):
    codes = random_codes(TINY, 2, max(90, sizes[0] + 20), seed=1)
    wanted = one_pass(tiny.module, codes)
    assert difference(in_pieces(tiny, codes, cycle(sizes)), wanted) <= ALLOWED


@pytest.mark.invariant("AR-INV-120")
def test_the_released_shape_lags_555_samples_and_is_exact():
    model = StreamedCode2Wav(loud_codec(REAL_SHAPE), device="cpu", max_streams=1)
    codes = random_codes(REAL_SHAPE, 1, 104, seed=2)
    wanted = one_pass(model.module, codes)
    assert wanted.shape[1] == 104 * 1920 - 555
    assert (model.lag, model.samples_per_frame) == (555, 1920)
    assert difference(in_pieces(model, codes, chain([4], cycle([25]))), wanted) <= ALLOWED


@pytest.mark.parametrize("upsampling", [(), (2,)])
def test_output_that_is_later_than_a_frame_long_is_exact(upsampling):
    """Without upsampling in front the lag is more samples than one frame has."""
    settings = {**TINY, "upsampling_ratios": upsampling, "upsample_rates": (2, 2)}
    model = StreamedCode2Wav(loud_codec(settings), device="cpu", max_streams=1)
    codes = random_codes(settings, 1, 20, seed=3)
    assert difference(in_pieces(model, codes, cycle([1])), one_pass(model.module, codes)) <= ALLOWED


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_both_kinds_of_attention(implementation):
    module = loud_codec(TINY)
    module.set_attn_implementation(implementation)
    model = StreamedCode2Wav(module, device="cpu", max_streams=1)
    codes = random_codes(TINY, 1, 40, seed=4)
    assert difference(in_pieces(model, codes, cycle([7])), one_pass(module, codes)) <= ALLOWED


@pytest.mark.invariant("AR-INV-121")
def test_streams_of_different_age_share_a_batch(tiny):
    """The first is 30 frames on when the second begins; the third ends with a padded piece."""
    codes = random_codes(TINY, 3, 45, seed=5)
    wanted = one_pass(tiny.module, codes)
    first, second = tiny.begin(("a", 0)), tiny.begin(("b", 0))
    waves = {first: [], second: []}
    waves[first] += tiny.decode([first], codes[:1, :30], [30])
    third = tiny.begin(("c", 0))
    waves[third] = tiny.decode([third], codes[2:, :38], [38])
    batch = torch.stack([codes[0, 30:45], codes[1, :15], torch.zeros_like(codes[2, :15])])
    batch[2, :7] = codes[2, 38:45]
    streams = [first, second, third]
    for stream, wave in zip(streams, tiny.decode(streams, batch, [15, 15, 7]), strict=True):
        waves[stream].append(wave)
    for stream in streams:
        tiny.release(stream)
    found = [torch.cat(pieces) for pieces in waves.values()]
    assert difference(found[0], wanted[0]) <= ALLOWED
    assert difference(found[1], wanted[1, : len(found[1])]) <= ALLOWED
    assert len(found[1]) == 15 * tiny.samples_per_frame - tiny.lag
    assert difference(found[2], wanted[2]) <= ALLOWED


@pytest.mark.invariant("AR-INV-122")
def test_state_is_fixed_and_a_row_begins_anew(tiny):
    codes = random_codes(TINY, 1, 60, seed=6)
    before = {name: tensor.data_ptr() for name, tensor in tiny._pool.tensors.items()}
    once = in_pieces(tiny, codes, cycle([9]))
    again = in_pieces(tiny, codes, cycle([9]))
    assert torch.equal(once, again)
    assert tiny.num_streams == 0
    assert before == {name: tensor.data_ptr() for name, tensor in tiny._pool.tensors.items()}
    assert tiny.bytes_per_stream == sum(
        tensor[0].numel() * tensor.element_size() for tensor in tiny._pool.tensors.values()
    )


def test_a_piece_that_fails_leaves_the_stream_as_it_was(tiny):
    codes = random_codes(TINY, 1, 24, seed=7)
    stream = tiny.begin(("a", 0))
    pieces = tiny.decode([stream], codes[:, :12], [12])

    def fail(*_):
        raise RuntimeError("injected")

    handle = tiny.module.decoder[-1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="injected"):
        tiny.decode([stream], codes[:, 12:], [12])
    handle.remove()
    pieces += tiny.decode([stream], codes[:, 12:], [12])
    tiny.release(stream)
    assert difference(torch.cat(pieces)[None], one_pass(tiny.module, codes)) <= ALLOWED


@pytest.mark.invariant("AR-INV-121")
def test_captured_steps_are_the_one_pass_decode():
    """Played graphs: fixed inputs, one result that each replay overwrites. Three streams share a
    graph of four; the third ends early, at a size that is captured; seven frames are not."""
    model = StreamedCode2Wav(loud_codec(TINY), device="cpu", max_streams=4)
    platform = GraphPlatform()
    model.capture(platform, max_batch=4, sizes=(4, 25), report=lambda note, fraction: None)
    assert len(platform.graphs) == 6
    codes = random_codes(TINY, 3, 61, seed=9)
    wanted = one_pass(model.module, codes)
    streams = [model.begin(("r", index)) for index in range(3)]
    waves = [[] for _ in streams]
    for start, size, last in ((0, 4, 4), (4, 25, 25), (29, 25, 10), (54, 7, 0)):
        piece = codes[:, start : start + size].clone()
        piece[2, last:] = 0
        count = 3 if last else 2
        frames = [size, size, last][:count]
        for row, wave in enumerate(model.decode(streams[:count], piece[:count], frames)):
            waves[row].append(wave.clone())
    for row in (0, 1):
        assert difference(torch.cat(waves[row]), wanted[row]) <= ALLOWED
    ended = torch.cat(waves[2])
    assert len(ended) == 39 * model.samples_per_frame - model.lag
    assert difference(ended, wanted[2, : len(ended)]) <= ALLOWED
    model.close()
    assert all(graph.is_reset for graph in platform.graphs)


def test_long_audio_leaves_nothing_behind(tiny):
    """Ten minutes' frames would be more of the same: no tensor stays from a piece to the next."""
    stream = tiny.begin(("a", 0))
    codes = random_codes(TINY, 1, 25, seed=10)

    def tensors_after(pieces: int) -> int:
        for _ in range(pieces):
            tiny.decode([stream], codes, [25])
        gc.collect()
        return sum(type(one) is torch.Tensor for one in gc.get_objects())

    assert tensors_after(1) == tensors_after(29)
    tiny.release(stream)


def stateful_names() -> list[str]:
    model = StreamedCode2Wav(loud_codec(TINY), device="cpu", max_streams=1)
    return list(model._pool.tensors)


@pytest.mark.invariant("AR-INV-123")
@pytest.mark.parametrize("name", stateful_names())
def test_every_piece_of_state_matters_and_the_gate_sees_each(name, monkeypatch):
    """Any one context that is not carried on is heard, and refused at load."""
    model = StreamedCode2Wav(loud_codec(TINY), device="cpu", max_streams=1)
    assert check_against_one_pass(model) <= ALLOWED
    during = CausalConvs.during

    def forgetful(self, step):
        step.read[name] = torch.zeros_like(step.read[name]) if name in step.read else None
        return during(self, step)

    monkeypatch.setattr(CausalConvs, "during", forgetful)
    codes = random_codes(TINY, 1, 40, seed=8)
    assert difference(in_pieces(model, codes, cycle([5])), one_pass(model.module, codes)) > 1e-3
    with pytest.raises(UnsupportedCombinationError, match="differs from one pass"):
        check_against_one_pass(model)


@pytest.mark.invariant("AR-INV-123")
def test_unknown_layers_are_refused():
    module = loud_codec(TINY)
    module.decoder.append(torch.nn.GRU(4, 4))
    with pytest.raises(UnsupportedCombinationError, match="GRU"):
        StreamedCode2Wav(module, device="cpu", max_streams=1)


@pytest.mark.invariant("AR-INV-123")
def test_attention_without_a_mask_is_refused():
    module = loud_codec(TINY)
    module.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedCombinationError, match="flash_attention_2"):
        StreamedCode2Wav(module, device="cpu", max_streams=1)
