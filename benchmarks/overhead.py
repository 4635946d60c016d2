"""What the engine adds to one request: a call through `Omni` over the bare `diffusers` call.

Both sides get the same arguments, and the pictures must be equal bit for bit before times count.
Measured with the stage in this process and with the stage in a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import (
    elapsed_s,
    finish,
    median,
    model_folder,
    parser,
    same_threads_everywhere,
    take_turns,
)

TARGET_RATIO = 1.10
VARIANTS = {"inline": "inline", "spawned": "separate"}
"""Name → where the stage runs (`process=` of the engine)."""


def main(argv: list[str] | None = None) -> int:
    flags = parser(__doc__, rounds=20)
    flags.add_argument("--side", type=int, default=128, help="pixels (%(default)s)")
    flags.add_argument("--steps", type=int, default=10, help="(%(default)s)")
    flags.add_argument("--true-cfg-scale", type=float, default=1.0, help="(%(default)s)")
    args = flags.parse_args(argv)
    same_threads_everywhere(args.threads)
    call = {
        "prompt": "a small red circle above a blue square on a yellow background",
        "height": args.side,
        "width": args.side,
        "num_inference_steps": args.steps,
        "true_cfg_scale": args.true_cfg_scale,
    }
    if args.true_cfg_scale > 1:
        call["negative_prompt"] = " "
    folder = model_folder(args.model)
    peer = bare_pipeline(folder, call)
    variants = {
        name: measure(args.model, process, call, peer, args.rounds, name)
        for name, process in VARIANTS.items()
    }
    worst = max(variants.values(), key=lambda one: one["ratio"])
    return finish(
        "overhead",
        value=worst["value"],
        unit="s",
        peer=f"the bare {type_name(folder)} call of diffusers in this process",
        peer_value=worst["peer_value"],
        target=TARGET_RATIO,
        met=all(one["ratio"] <= TARGET_RATIO for one in variants.values()),
        workload=(
            f"one request to {served_name(args.model)}, {args.side}x{args.side}, {args.steps} "
            f"steps, true_cfg_scale {args.true_cfg_scale:g}, float32, CPU, {args.threads} "
            f"thread(s); median of {args.rounds}, alternating; ratio of the worst variant"
        ),
        save=args.save,
        variants=variants,
    )


def measure(
    model: str,
    process: str,
    call: dict[str, Any],
    peer: Callable[[int], list[bytes]],
    rounds: int,
    name: str,
) -> dict[str, float]:
    from omnistage import Omni, OmniDiffusionSamplingParams

    given = dict(call)
    texts = [name for name in ("prompt", "negative_prompt") if name in given]
    prompt = {name: given.pop(name) for name in texts}
    with Omni(model, process=process, device="cpu", dtype="float32", log_level="error") as omni:

        def ours(seed: int) -> list[bytes]:
            params = OmniDiffusionSamplingParams(seed=seed, **given)
            (output,) = omni.generate(prompt, params, use_tqdm=False)
            if output.error is not None:
                raise output.error
            return [picture.tobytes() for picture in output.images]

        for seed in range(2):  # The first calls of both sides also warm them up.
            assert ours(seed) == peer(seed) != [], f"{name}: the pictures differ"
        sides = [lambda: elapsed_s(lambda: ours(0))[0], lambda: elapsed_s(lambda: peer(0))[0]]
        taken = take_turns(sides, rounds, [name, "diffusers"])
    value, peer_value = map(median, taken)
    return {"value": value, "peer_value": peer_value, "ratio": round(value / peer_value, 4)}


def bare_pipeline(folder: Path, call: dict[str, Any]) -> Callable[[int], list[bytes]]:
    import torch
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)

    def run(seed: int) -> list[bytes]:
        generator = torch.Generator("cpu").manual_seed(seed)
        with torch.no_grad():
            return [image.tobytes() for image in pipeline(**call, generator=generator).images]

    return run


def type_name(folder: Path) -> str:
    from omnistage.memory.pipeline_loader import read_index

    return str(read_index(folder)["_class_name"])


def served_name(model: str) -> str:
    from omnistage.models.registry import find_pipeline

    return find_pipeline(model).served_name


if __name__ == "__main__":
    sys.exit(main())
