"""Train the bundled tiny text-to-image model from nothing.

    python training/tiny_image/train.py --out DIR             both stages, under 20 minutes
    python training/tiny_image/train.py --out DIR --smoke     a few steps, on a CPU too
    python training/tiny_image/train.py --out DIR --stage vae
    python training/tiny_image/train.py --out DIR --stage transformer [--resume]
    python training/tiny_image/train.py --out DIR --stage sharpen    optional, on a CPU

Leaves `DIR/vae` after the first stage and the whole pipeline in `DIR/checkpoint` after the second;
the third one improves the decoder in `DIR/checkpoint`.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from training.tiny_image.autoencoder import train_autoencoder
from training.tiny_image.components import save_pipeline
from training.tiny_image.dataset import Pairs, make_pairs
from training.tiny_image.denoiser import train_denoiser
from training.tiny_image.loop import Schedule
from training.tiny_image.sharpen import sharpen_decoder
from training.tiny_image.tokenizer import train_tokenizer

SEED = 7
SECONDS = {"vae": 165.0, "transformer": 440.0, "sharpen": 700.0}
SMOKE_STEPS = 5
Log = Callable[..., None]


def make_log(path: Path) -> Log:
    """A function that prints a record and appends it to a file of JSON lines."""

    def log(**values: object) -> None:
        line = json.dumps(values)
        print(line, flush=True)
        with path.open("a") as file:
            file.write(line + "\n")

    return log


def make_schedule(args: argparse.Namespace, stage: str) -> Schedule:
    return Schedule(SMOKE_STEPS if args.smoke else 10**9, args.time_limit_s or SECONDS[stage])


def load_autoencoder(directory: Path) -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage.from_pretrained(directory, torch_dtype=torch.float32)


def save_autoencoder(autoencoder: AutoencoderKLQwenImage, directory: Path) -> None:
    autoencoder.register_to_config(_name_or_path=None)
    autoencoder.eval().to("cpu", torch.float16).save_pretrained(directory)


def run_vae_stage(args: argparse.Namespace, pairs: Pairs, log: Log) -> None:
    schedule = make_schedule(args, "vae")
    autoencoder = train_autoencoder(pairs.scenes, schedule, args.vae_batch, log, args.graph)
    save_autoencoder(autoencoder, args.out / "vae")


def run_transformer_stage(args: argparse.Namespace, pairs: Pairs, log: Log) -> None:
    autoencoder = load_autoencoder(args.out / "vae")
    tokenizer = train_tokenizer()
    weights = args.out / "denoiser.safetensors"
    denoiser = train_denoiser(
        pairs,
        autoencoder.to(args.device),
        tokenizer,
        make_schedule(args, "transformer"),
        args.batch,
        log,
        graph=args.graph,
        resume_from=load_file(weights) if args.resume else None,
    )
    trained = {
        name: value.bfloat16().contiguous()
        for name, value in denoiser.state_dict().items()
        if "visual" not in name and "lm_head" not in name
    }
    save_file(trained, weights)
    save_pipeline(
        str(args.out / "checkpoint"),
        autoencoder,
        denoiser.transformer,
        denoiser.text_encoder,
        tokenizer,
    )


def run_sharpen_stage(args: argparse.Namespace, log: Log) -> None:
    """Replace the decoder of the finished pipeline; the other parts never see it."""
    torch.set_num_threads(1)  # more threads only get in each other's way at this size
    directory = args.out / "checkpoint" / "vae"
    autoencoder = load_autoencoder(directory)
    schedule = make_schedule(args, "sharpen")

    def save(sharpened: AutoencoderKLQwenImage) -> None:
        save_autoencoder(sharpened, directory)

    sharpen_decoder(autoencoder, schedule, args.sharpen_batch, log, save, SEED)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", choices=("all", *SECONDS), default="all")
    parser.add_argument("--time-limit-s", type=float, help="seconds of training per stage")
    parser.add_argument("--smoke", action="store_true", help="a few small steps")
    parser.add_argument("--resume", action="store_true", help="go on from DIR/denoiser.safetensors")
    parser.add_argument("--pairs", type=int, default=500_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--vae-batch", type=int, default=96)
    parser.add_argument("--sharpen-batch", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="no compiler, no CUDA graphs")
    args = parser.parse_args()
    args.graph = args.device == "cuda" and not args.eager
    if args.smoke:
        args.pairs, args.batch, args.vae_batch = 128, 16, 4
    return args


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    log = make_log(args.out / "log.jsonl")
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    if args.stage == "sharpen":
        run_sharpen_stage(args, log)
        return
    pairs = make_pairs(train_tokenizer(), args.pairs, SEED).to(args.device)
    log(pairs=len(pairs.ids))
    if args.stage in ("all", "vae"):
        run_vae_stage(args, pairs, log)
    if args.stage in ("all", "transformer"):
        run_transformer_stage(args, pairs, log)


if __name__ == "__main__":
    main()
