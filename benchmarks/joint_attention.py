"""Joint attention at the shapes of Qwen-Image on a card: tiles of the kernel, and the operator.

Both guidance branches of one step, bfloat16. Prints a table and, as its last line, JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

HEADS, HEAD_DIM = 24, 128
TOKENS = {"1024": 4096, "512": 1024}
LENGTHS = (256, 10)
TILES = tuple(itertools.product((8, 16, 32), (1, 2, 3, 4, 8), (4, 8)))


def microseconds(work: Callable[[], Any], repeats: int) -> float:
    import torch

    for _ in range(3):
        work()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats * 1e3


def replayed(work: Callable[[], Any]) -> Callable[[], None]:
    """The same work from a captured graph: without the time that its launches take."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def case(image_tokens: int) -> tuple[Any, Any, Any]:
    import torch

    from omnistage.attention.joint_math import Preparation, Projections

    def stream(tokens: int) -> Projections:
        shape = (len(LENGTHS), tokens, HEADS * HEAD_DIM)
        return Projections(
            *(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
        )

    weights = [torch.ones(HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    turns = [
        torch.ones(tokens, HEAD_DIM // 2, 2, device="cuda")
        for tokens in (image_tokens, max(LENGTHS))
    ]
    return (
        stream(image_tokens),
        stream(max(LENGTHS)),
        Preparation(HEAD_DIM, 1e-6, weights, turns),
    )


def tiles_us(image: Any, text: Any, preparation: Any, repeats: int) -> dict[str, float]:
    from omnistage.attention.triton_joint import Tile, join_with_triton

    found = {}
    for rows, heads, warps in TILES:
        tile = Tile(rows, heads, warps)
        work = replayed(lambda tile=tile: join_with_triton(image, text, preparation, tile))
        found[f"rows={rows} heads={heads} warps={warps}"] = microseconds(work, repeats)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def operator_us(image: Any, text: Any, preparation: Any, repeats: int) -> dict[str, float]:
    import torch

    from omnistage.attention.joint_op import joint_attention

    streams = [*image], [*text], [*preparation.norm_weights], [*preparation.frequencies]

    def attend(lengths: torch.Tensor | None) -> Any:
        return joint_attention(*streams, lengths, HEAD_DIM, preparation.eps, "")

    lengths = torch.tensor(LENGTHS)
    return {
        "two lengths, launched": microseconds(lambda: attend(lengths), repeats),
        "two lengths, graph": microseconds(replayed(lambda: attend(lengths)), repeats),
        "equal lengths, graph": microseconds(replayed(lambda: attend(None)), repeats),
        "attention alone, one sample after the other": microseconds(
            replayed(lambda: one_after_the_other(image, text)), repeats
        ),
    }


def one_after_the_other(image: Any, text: Any) -> None:
    import torch

    for length in LENGTHS:
        tokens = image.q.shape[1] + length
        joint = image.q.new_empty(1, tokens, HEADS, HEAD_DIM).transpose(1, 2)
        torch.nn.functional.scaled_dot_product_attention(joint, joint, joint)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--repeats", type=int, default=30)
    repeats = flags.parse_args().repeats
    import torch

    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for side, image_tokens in TOKENS.items():
        given = case(image_tokens)
        moved_bytes = 2 * sum(each.nbytes for each in (*given[0], *given[1]))
        tiles, operator = tiles_us(*given, repeats), operator_us(*given, repeats)
        result[side] = {"kernel_us": tiles, "operator_us": operator, "moved_bytes": moved_bytes}
        for name, taken in [*list(tiles.items())[:8], *operator.items()]:
            rate = f"{moved_bytes / taken / 1e3:8.0f} GB/s" if name in tiles else ""
            sys.stdout.write(f"{side} {name:45} {taken:9.1f} us {rate}\n")
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
