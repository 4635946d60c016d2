"""`omnistage generate` for models that write, and perhaps speak: the text goes to stdout."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.cli.values import at_least_one, number
from omnistage.contracts.errors import ConfigurationError

if TYPE_CHECKING:
    from omnistage.config.resolved import OmniConfig
    from omnistage.contracts.outputs import CompletionOutput, OmniRequestOutput
    from omnistage.contracts.sampling import OmniTokenSamplingParams, SamplingParams

SOUND_SUFFIX = ".wav"
_PICTURE_FLAGS = ("negative_prompt", "size", "steps", "guidance_scale", "true_cfg_scale")
_MORE_PICTURE_FLAGS = ("strength", "scheduler", "extra_args")
_TEXT_FLAGS = ("max_tokens", "temperature", "top_p", "top_k", "system", "raw")


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    text = parser.add_argument_group("text", "of models that write")
    text.add_argument("--max-tokens", type=at_least_one, metavar="N", help="longest text")
    text.add_argument("--temperature", type=number, metavar="X", help="0 takes the likeliest")
    text.add_argument("--top-p", type=number, metavar="X", help="nucleus to draw from")
    text.add_argument("--top-k", type=at_least_one, metavar="N", help="tokens to draw from")
    text.add_argument("--system", metavar="TEXT", help="system message")
    text.add_argument(
        "--raw", action="store_true", default=None, help="go on with the prompt, no chat template"
    )


def is_text_model(config: OmniConfig) -> bool:
    from omnistage.contracts.modalities import Modality

    stages = config.pipeline.stages
    return any(s.final_output and s.output_modality is Modality.TEXT for s in stages)


def refuse_text_flags(args: argparse.Namespace) -> None:
    """For a model that makes pictures."""
    _refuse(args, _TEXT_FLAGS, "this model makes pictures")


def run_text(args: argparse.Namespace, config: OmniConfig) -> int:
    _refuse(args, (*_PICTURE_FLAGS, *_MORE_PICTURE_FLAGS), "this model writes text")
    if args.raw and args.system is not None:
        raise ConfigurationError("--raw knows no messages; leave --system out")
    _check_sound(args.output, config)

    from omnistage.engine.omni import Omni

    wanted = ["text"] if args.output is None else ["text", "audio"]
    with Omni(config=config) as omni:
        options: dict[str, Any] = {
            "sampling_params_list": _params(args, config),
            "output_modalities": wanted,
        }
        if args.n == 1 and args.output is None:
            return _print_as_it_comes(omni.stream(_prompt(args, config), **options))
        (output,) = omni.generate(_prompt(args, config), **options, n=args.n, use_tqdm=False)
    if output.error is not None:
        raise output.error
    for answer in output.outputs:
        print(f"[{answer.index + 1}] {answer.text}" if args.n > 1 else answer.text)
    for path in _write_sounds(output.outputs, args.output):
        print(path)
    return 0


def _refuse(args: argparse.Namespace, names: tuple[str, ...], reason: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise ConfigurationError(f"--{name.replace('_', '-')}: {reason}; leave it out")


def _check_sound(path: Path | None, config: OmniConfig) -> None:
    from omnistage.contracts.modalities import Modality

    if path is None:
        return
    stages = config.pipeline.stages
    if not any(s.final_output and s.output_modality is Modality.AUDIO for s in stages):
        raise ConfigurationError(
            f"--output {path}: this model writes text, which is printed; leave --output out"
        )
    if path.suffix.lower() != SOUND_SUFFIX:
        raise ConfigurationError(f"--output {path} must end in {SOUND_SUFFIX}: the spoken answer")


def _prompt(args: argparse.Namespace, config: OmniConfig) -> Any:
    from omnistage.api.text.template import read_template
    from omnistage.cli.generate import read_image

    pictures = [read_image(path) for path in args.image]
    if args.raw or read_template(Path(config.model_path)) is None:
        if pictures:
            raise ConfigurationError("--image needs a chat template, which this prompt has not")
        return args.prompt
    parts: list[dict[str, Any]] = [{"type": "image", "image": picture} for picture in pictures]
    content: Any = [*parts, {"type": "text", "text": args.prompt}] if parts else args.prompt
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": content}]


def _params(args: argparse.Namespace, config: OmniConfig) -> list[SamplingParams]:
    """What was given is for the stage that writes; the others take the seed."""
    from omnistage.config.resolve import PARAMS_BY_EXECUTION
    from omnistage.contracts.modalities import Modality
    from omnistage.contracts.sampling import OmniTokenSamplingParams

    result: list[SamplingParams] = []
    for stage in config.pipeline.stages:
        kind = PARAMS_BY_EXECUTION[stage.execution_type]
        if kind is not OmniTokenSamplingParams:
            result.append(kind())
        elif stage.final_output and stage.output_modality is Modality.TEXT:
            result.append(_writer_params(args))
        else:
            result.append(OmniTokenSamplingParams(seed=args.seed))
    return result


def _writer_params(args: argparse.Namespace) -> OmniTokenSamplingParams:
    from omnistage.contracts.sampling import OmniTokenSamplingParams

    return OmniTokenSamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
    )


def _print_as_it_comes(events: Any) -> int:
    event: OmniRequestOutput
    for event in events:
        if event.text:
            sys.stdout.write(event.text)
            sys.stdout.flush()
    print()
    return 0


def _write_sounds(answers: list[CompletionOutput], path: Path | None) -> list[Path]:
    from omnistage.api.audio_encode import encode_audio

    if path is None:
        return []
    written: list[Path] = []
    for answer in answers:
        if answer.audio is None or answer.sample_rate is None:
            raise ConfigurationError("the model finished without a sound")
        target = path
        if len(answers) > 1:
            target = path.with_name(f"{path.stem}-{answer.index + 1}{path.suffix}")
        target.write_bytes(encode_audio(answer.audio, answer.sample_rate, "wav"))
        written.append(target)
    return written
