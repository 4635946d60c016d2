"""Measure how often a checkpoint draws what a held-out prompt asks for.

python training/tiny_image/evaluate.py --checkpoint DIR [--json FILE]
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import DiffusionPipeline, QwenImagePipeline

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from training.tiny_image.checker import Verdict, judge, read_picture
from training.tiny_image.prompts import Request, write_prompt
from training.tiny_image.scenes import IMAGE_SIZE, random_held_out_scene

RECOMMENDED_STEPS = 10
RECOMMENDED_GUIDANCE = 2.0


def held_out_requests(count: int, things: int, seed: int = 2024) -> list[Request]:
    """`count` prompts for scenes of `things` things, in combinations that training never saw."""
    rng = random.Random(f"{seed} {things}")
    scenes = [random_held_out_scene(rng, things) for _ in range(count)]
    return [Request(write_prompt(scene, rng), scene) for scene in scenes]


def draw(
    pipeline: QwenImagePipeline,
    prompts: Sequence[str],
    *,
    steps: int = RECOMMENDED_STEPS,
    guidance: float = RECOMMENDED_GUIDANCE,
    batch_size: int = 4,
) -> list[np.ndarray]:
    """Draw every prompt at the native size, seeded by its index: uint8 [128, 128, 3] each."""
    pictures = []
    for start in range(0, len(prompts), batch_size):
        chunk = list(prompts[start : start + batch_size])
        generators = [torch.Generator().manual_seed(start + index) for index in range(len(chunk))]
        images = pipeline(
            chunk,
            negative_prompt=[""] * len(chunk) if guidance > 1 else None,
            true_cfg_scale=guidance,
            num_inference_steps=steps,
            height=IMAGE_SIZE,
            width=IMAGE_SIZE,
            generator=generators,
            output_type="np",
        ).images
        pictures += [(image * 255).round().astype(np.uint8) for image in images]
    return pictures


def judge_all(requests: Sequence[Request], pictures: Sequence[np.ndarray]) -> list[Verdict]:
    """One verdict per request and its picture."""
    pairs = zip(requests, pictures, strict=True)
    return [judge(request.scene, read_picture(picture)) for request, picture in pairs]


def accuracies(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """The share of right pictures, 0..1, by attribute and for all attributes together."""
    shares = {
        name: float(np.mean([getattr(verdict, name) for verdict in verdicts]))
        for name in (*Verdict._fields, "exact")
    }
    return {name: round(share, 4) for name, share in shares.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--prompts", type=int, default=200, help="prompts per kind of scene")
    parser.add_argument("--steps", type=int, default=RECOMMENDED_STEPS)
    parser.add_argument("--guidance", type=float, default=RECOMMENDED_GUIDANCE)
    parser.add_argument("--shift", type=float, help="override the scheduler's shift")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="also write the report here")
    parser.add_argument("--failures", action="store_true", help="print the prompts that failed")
    args = parser.parse_args()

    pipeline = DiffusionPipeline.from_pretrained(args.checkpoint, torch_dtype=torch.float32)
    pipeline.to(args.device).set_progress_bar_config(disable=True)
    if args.shift:
        pipeline.scheduler.register_to_config(shift=args.shift)
        pipeline.scheduler.set_shift(args.shift)
    report = {"steps": args.steps, "guidance": args.guidance, "prompts": args.prompts}
    for kind, things in (("one_thing", 1), ("two_things", 2)):
        requests = held_out_requests(args.prompts, things)
        started = time.monotonic()
        pictures = draw(
            pipeline, [r.prompt for r in requests], steps=args.steps, guidance=args.guidance
        )
        seconds = (time.monotonic() - started) / len(requests)
        verdicts = judge_all(requests, pictures)
        report[kind] = accuracies(verdicts) | {"seconds_per_picture": round(seconds, 3)}
        for request, picture, verdict in zip(requests, pictures, verdicts, strict=True):
            if args.failures and not verdict.exact:
                wrong = [name for name in Verdict._fields if not getattr(verdict, name)]
                seen = [" ".join(thing) for thing in read_picture(picture).things]
                print(f"{request.prompt!r}: wrong {wrong}, shows {seen}")
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
