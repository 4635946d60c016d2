"""Denoisers of full size with random weights: as a checkpoint on disk, written from the device, and
as a pipeline without other parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights

from omnistage.memory.pipeline_plan import LibraryComponent, PipelinePlan
from omnistage.memory.planner import component_checkpoint, plan_tensors
from omnistage.memory.skeleton import read_config

_SHARD_BYTES = 5_000_000_000
_STORED = {torch.bfloat16: "BF16", torch.float32: "F32"}
_WRITERS = 8


@dataclass(frozen=True, kw_only=True)
class DenoiserShape:
    """A class of diffusers with its configuration, the inputs of one forward of `rows` rows, and
    the pipeline that its checkpoint belongs to. Inputs: `rows`, `height`, `width` in pixels,
    `frames` for video."""

    name: str
    cls: str
    pipeline: str
    config: dict[str, Any]
    inputs: Callable[..., dict[str, Any]]


def _qwen_inputs(rows: int, height: int, width: int, device: str, **_: Any) -> dict[str, Any]:
    h, w = height // 16, width // 16
    return {
        "hidden_states": _noise(rows, h * w, 64, device=device),
        "encoder_hidden_states": _noise(rows, 256, 3584, device=device),
        "encoder_hidden_states_mask": None,
        "timestep": torch.full((rows,), 0.5, device=device, dtype=torch.bfloat16),
        "img_shapes": [[(1, h, w)]] * rows,
    }


def _wan_inputs(rows: int, height: int, width: int, device: str, frames: int) -> dict[str, Any]:
    return {
        "hidden_states": _noise(
            rows, 16, (frames - 1) // 4 + 1, height // 8, width // 8, device=device
        ),
        "encoder_hidden_states": _noise(rows, 512, 4096, device=device),
        "timestep": torch.full((rows,), 500, device=device),
    }


def _flux_inputs(rows: int, height: int, width: int, device: str, **_: Any) -> dict[str, Any]:
    h, w = height // 16, width // 16
    places = torch.zeros(h, w, 3, device=device, dtype=torch.bfloat16)
    places[..., 1] = torch.arange(h, device=device)[:, None]
    places[..., 2] = torch.arange(w, device=device)[None]
    return {
        "hidden_states": _noise(rows, h * w, 64, device=device),
        "encoder_hidden_states": _noise(rows, 512, 4096, device=device),
        "pooled_projections": _noise(rows, 768, device=device),
        "timestep": torch.full((rows,), 0.5, device=device, dtype=torch.bfloat16),
        "guidance": torch.full((rows,), 3.5, device=device, dtype=torch.bfloat16),
        "img_ids": places.reshape(-1, 3),
        "txt_ids": torch.zeros(512, 3, device=device, dtype=torch.bfloat16),
    }


def _noise(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


QWEN_IMAGE = DenoiserShape(
    name="Qwen-Image 20B",
    cls="QwenImageTransformer2DModel",
    pipeline="QwenImagePipeline",
    config={
        "patch_size": 2,
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 60,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 3584,
        "guidance_embeds": False,
        "axes_dims_rope": (16, 56, 56),
    },
    inputs=_qwen_inputs,
)
WAN_14B = DenoiserShape(
    name="Wan2.2-14B",
    cls="WanTransformer3DModel",
    pipeline="WanPipeline",
    config={
        "patch_size": (1, 2, 2),
        "num_attention_heads": 40,
        "attention_head_dim": 128,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": 13824,
        "num_layers": 40,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "rope_max_seq_len": 1024,
    },
    inputs=_wan_inputs,
)
FLUX = DenoiserShape(
    name="Flux 12B",
    cls="FluxTransformer2DModel",
    pipeline="FluxPipeline",
    config={
        "patch_size": 1,
        "in_channels": 64,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": True,
        "axes_dims_rope": (16, 56, 56),
    },
    inputs=_flux_inputs,
)
MODELS = {"qwen": QWEN_IMAGE, "wan": WAN_14B, "flux": FLUX}


def smaller(shape: DenoiserShape) -> DenoiserShape:
    """Of the same class, to try a benchmark on a CPU: its text inputs keep their width."""
    changes: dict[str, Any] = {"num_attention_heads": 1, "num_layers": 4}
    if "num_single_layers" in shape.config:
        changes["num_single_layers"] = 4
    if "ffn_dim" in shape.config:
        changes |= {"ffn_dim": 256, "num_attention_heads": 2}
    return DenoiserShape(
        name=f"{shape.name} (small)",
        cls=shape.cls,
        pipeline=shape.pipeline,
        config=shape.config | changes,
        inputs=shape.inputs,
    )


def skeleton(shape: DenoiserShape) -> torch.nn.Module:
    """Without weights, in bfloat16 but for what its class keeps in float32."""
    import diffusers

    cls: Any = getattr(diffusers, shape.cls)
    with init_empty_weights():
        module = cls(**shape.config)
    kept = cls._keep_in_fp32_modules or ()
    for name, parameter in module.named_parameters():
        if not set(kept) & set(name.split(".")):
            parameter.data = parameter.data.bfloat16()
    return module.eval().requires_grad_(False)


def denoiser_plan(shape: DenoiserShape, folder: Path, device: str) -> PipelinePlan:
    """The loading plan of such a checkpoint, as that of a pipeline without other parts."""
    import diffusers

    pipeline: Any = getattr(diffusers, shape.pipeline)
    cls: Any = getattr(diffusers, shape.cls)
    part = folder / "transformer"
    plan = plan_tensors(
        cls,
        read_config(cls, part),
        component_checkpoint(cls, part),
        component="transformer",
        dtype="bfloat16",
        device=device,
    )
    names = pipeline._get_signature_keys(pipeline)[0]
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler
    return PipelinePlan(
        folder=folder,
        pipeline_class=pipeline,
        dtype="bfloat16",
        device=device,
        modules={"transformer": plan},
        others={"scheduler": LibraryComponent(cls=scheduler, folder=folder / "scheduler")},
        settings={},
        absent=tuple(sorted(set(names) - {"transformer", "scheduler"})),
    )


def write_checkpoint(shape: DenoiserShape, folder: Path, device: str, seed: int = 0) -> int:
    """A denoiser's folder and a schedule's, in shards that are written at once; bytes of weights.

    Weights are normal with standard deviation 0.02, norms one, biases zero, made on the device.
    """
    import diffusers

    diffusers.FlowMatchEulerDiscreteScheduler().save_pretrained(folder / "scheduler")
    module = skeleton(shape)
    target = folder / "transformer"
    target.mkdir(parents=True)
    module.save_config(target)
    shards = list(_shards(module.state_dict()))
    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor(_WRITERS) as pool:
        writing = []
        for number, tensors in enumerate(shards):
            name = f"diffusion_pytorch_model-{number + 1:05}-of-{len(shards):05}.safetensors"
            weight_map |= dict.fromkeys(tensors, name)
            generator = torch.Generator(device).manual_seed(seed + number)
            writing.append(pool.submit(_write_shard, target / name, tensors, device, generator))
        for one in writing:
            one.result()
    total_bytes = sum(tensor.nbytes for tensors in shards for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    path = target / "diffusion_pytorch_model.safetensors.index.json"
    path.write_text(json.dumps(index))
    return total_bytes


def _shards(tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    taken = 0
    for name in sorted(tensors):
        if taken and taken + tensors[name].nbytes > _SHARD_BYTES:
            yield shard
            shard, taken = {}, 0
        shard[name] = tensors[name]
        taken += tensors[name].nbytes
    yield shard


def _write_shard(
    file: Path, tensors: dict[str, torch.Tensor], device: str, generator: torch.Generator
) -> None:
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _STORED[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    most_bytes = max(tensor.nbytes for tensor in tensors.values())
    staging = torch.empty(most_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            data = _random(name, tensor, device, generator).view(-1).view(torch.uint8)
            stream.write(memoryview(staging[: data.numel()].copy_(data).numpy()))


def _random(name: str, like: torch.Tensor, device: str, generator: torch.Generator) -> torch.Tensor:
    if like.dim() == 1:
        filler = torch.zeros if name.endswith("bias") else torch.ones
        return filler(like.shape, device=device, dtype=like.dtype)
    values = torch.empty(like.shape, device=device, dtype=like.dtype)
    return values.normal_(0, 0.02, generator=generator)
