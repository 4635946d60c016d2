"""Qwen3-Omni's codec decoder, streamed: seconds of computing for a second of sound.

Ours carries state from piece to piece, for several streams in a batch; transformers' own way to
decode in pieces (`chunked_decode`) computes 25 frames of context again for each 25, one stream
after the other. Both are held against the one-pass decode of the same codes. Random weights in the
released shape (`--tiny`: a toy). The last line is JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from _common import elapsed_s, finish, median, parser, same_threads_everywhere, take_turns

FIRST, PIECE = 4, 25
TARGET = 0.75
"""Ours over the peer's: half of what the peer computes is context."""
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "decoder_dim": 64,
}


def make_module(device: str, dtype: str, tiny: bool) -> Any:
    import torch
    from transformers import Qwen3OmniMoeCode2Wav
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
        Qwen3OmniMoeCode2WavConfig,
    )

    torch.manual_seed(0)
    config = Qwen3OmniMoeCode2WavConfig(**(TINY if tiny else {}))
    module = Qwen3OmniMoeCode2Wav._from_config(config, dtype=getattr(torch, dtype))
    return module.to(device).eval().requires_grad_(False)


class Ours:
    """All streams of `codes` (B, T, G), a first piece of 4 frames and then 25 each."""

    def __init__(self, model: Any, codes: Any) -> None:
        self.model, self.codes = model, codes
        self.waves: list[Any] = []

    def __call__(self) -> None:
        import torch

        streams = [self.model.begin(("r", index)) for index in range(len(self.codes))]
        sizes = [FIRST, *[PIECE] * ((self.codes.shape[1] - FIRST) // PIECE)]
        pieces = []
        for piece in self.codes.split(sizes, dim=1):
            waves = self.model.decode(streams, piece, [piece.shape[1]] * len(streams))
            pieces.append([wave.cpu() for wave in waves])
        for stream in streams:
            self.model.release(stream)
        self.waves = [torch.cat(parts) for parts in zip(*pieces, strict=True)]


class Peer:
    def __init__(self, module: Any, codes: Any) -> None:
        self.module, self.codes = module, codes
        self.waves: list[Any] = []

    def __call__(self) -> None:
        self.waves = [
            self.module.chunked_decode(one.T[None], chunk_size=PIECE, left_context_size=PIECE)[
                0, 0
            ].cpu()
            for one in self.codes
        ]


def error_of_peak(waves: list[Any], module: Any, codes: Any) -> float | None:
    """None: not even the number of samples is that of one pass."""
    wanted = module(codes[0].T[None])[0, 0].float().cpu()
    if waves[0].shape != wanted.shape:
        return None
    return float((waves[0].float() - wanted).abs().max() / wanted.abs().max())


def timed(work: Callable[[], None], sound_s: float) -> Callable[[], float]:
    return lambda: elapsed_s(work)[0] / sound_s


def main() -> int:
    flags = parser(__doc__, rounds=3)
    flags.add_argument("--device", default="cpu")
    flags.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    flags.add_argument("--streams", type=int, default=4)
    flags.add_argument("--pieces", type=int, default=2, help="of 25 frames, after the first")
    flags.add_argument("--tiny", action="store_true")
    chosen = flags.parse_args()
    same_threads_everywhere(chosen.threads)
    import torch

    from omnistage.models.qwen3_omni.code2wav import StreamedCode2Wav
    from omnistage.platforms.registry import platform_of

    module = make_module(chosen.device, chosen.dtype, chosen.tiny)
    model = StreamedCode2Wav(module, device=chosen.device, max_streams=chosen.streams)
    platform = platform_of(chosen.device)
    if platform.graphs_unavailable_reason() is None:
        model.capture(
            platform, max_batch=chosen.streams, sizes=(FIRST, PIECE), report=lambda *_: None
        )
    frames = FIRST + PIECE * chosen.pieces
    shape = (chosen.streams, frames, model.num_codebooks)
    codes = torch.randint(model.codebook_size, shape).to(chosen.device)
    stream_s = frames * model.samples_per_frame / model.sample_rate
    ours, alone, peer = Ours(model, codes), Ours(model, codes[:1]), Peer(module, codes)
    first = lambda: model.release(_first_piece(model, codes))  # noqa: E731
    for warm in (ours, alone, peer, first):
        warm()
    sides = [
        timed(ours, stream_s * chosen.streams),
        timed(alone, stream_s),
        timed(peer, stream_s * chosen.streams),
        timed(first, 1.0),
    ]
    names = ("ours, batch", "ours, one", "chunked_decode", "first piece")
    batch, one, theirs, first_s = map(median, take_turns(sides, chosen.rounds, names))
    return finish(
        "code2wav",
        value=batch,
        unit="s",
        peer="transformers chunked_decode(25, 25), one stream after the other",
        peer_value=theirs,
        target=TARGET,
        met=batch <= TARGET * theirs,
        workload=f"{'tiny' if chosen.tiny else 'released'} shape, {chosen.dtype}, {chosen.streams} "
        f"streams of {frames} frames in pieces of 25; computing per second of sound",
        save=chosen.save,
        one_stream=one,
        first_piece_ms=round(first_s * 1000, 2),
        state_bytes_per_stream=model.bytes_per_stream,
        error_of_peak={
            "ours": error_of_peak(ours.waves, module, codes),
            "peer": error_of_peak(peer.waves, module, codes),
        },
        device=chosen.device,
    )


def _first_piece(model: Any, codes: Any) -> Any:
    stream = model.begin(("first", 0))
    model.decode([stream], codes[:1, :FIRST], [FIRST])[0].cpu()
    return stream


if __name__ == "__main__":
    sys.exit(main())
