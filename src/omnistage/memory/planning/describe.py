"""A placement for people and for `--json`."""

from __future__ import annotations

from typing import Any

from omnistage.memory.offload.host import HostBacking
from omnistage.memory.placement import ComponentPlacement, Placement, Residency
from omnistage.memory.plan import gib

WHERE = {
    HostBacking.CHECKPOINT: "the checkpoint's files, where they hold the bytes that are wanted",
    HostBacking.RUNTIME_CACHE: "the runtime cache",
    HostBacking.PRIVATE: "private memory",
}


def describe_placement(placement: Placement) -> str:
    """Several lines: the decision, a line a component, what is predicted, and why."""
    decision, *reasons = placement.reasons or (f"offload {placement.strategy}",)
    lines = [decision]
    lines += [f"  {_component(one)}" for one in placement.components.values()]
    if placement.streams:
        lines.append(
            f"  streamed blocks lie in {WHERE[placement.backing]}; page-locked: {_limit(placement)}"
        )
    lines += [f"  {line}" for line in _prediction(placement)]
    lines += [f"  {reason}" for reason in reasons]
    return "\n".join(lines)


def placement_data(placement: Placement) -> dict[str, Any]:
    """Of plain values: bytes and seconds."""
    prediction = placement.prediction
    return {
        "strategy": placement.strategy,
        "backing": str(placement.backing),
        "page_lock_limit_bytes": placement.page_lock_limit_bytes,
        "components": {
            name: {
                "residency": str(one.residency),
                "weight_bytes": one.weight_bytes,
                "streamed_bytes": one.streamed_bytes,
                "block_bytes": one.block_bytes,
                "streamed_blocks": list(one.streamed_blocks),
            }
            for name, one in placement.components.items()
        },
        "prediction": prediction
        and {
            "device_peak_bytes": prediction.device_peak_bytes,
            "phases_bytes": dict(prediction.phases_bytes),
            "host_bytes": prediction.host_bytes,
            "locked_bytes": prediction.locked_bytes,
            "step_s": prediction.step_s,
        },
        "reasons": list(placement.reasons),
    }


def _component(one: ComponentPlacement) -> str:
    words = f"{one.component}: {gib(one.weight_bytes)}, {one.residency}"
    if one.residency is not Residency.STREAMED:
        return words
    resident_bytes = one.weight_bytes - one.streamed_bytes
    return (
        f"{words}: {len(one.streamed_blocks)} blocks of at most {gib(one.block_bytes)}, "
        f"{gib(one.streamed_bytes)} a pass; {gib(max(0, resident_bytes))} stay"
    )


def _limit(placement: Placement) -> str:
    limit_bytes = placement.page_lock_limit_bytes
    if limit_bytes is None:
        return "as much as the host allows"
    return f"at most {gib(limit_bytes)}" if limit_bytes else "nothing, copies are staged"


def _prediction(placement: Placement) -> list[str]:
    found = placement.prediction
    if found is None:
        return []
    phases = ", ".join(f"{phase} {gib(nbytes)}" for phase, nbytes in found.phases_bytes.items())
    step = "unknown" if found.step_s is None else f"{found.step_s * 1000:.1f} ms"
    return [
        f"predicted peak on the device: {gib(found.device_peak_bytes)} ({phases})",
        f"host memory of its own: {gib(found.host_bytes)}, page-locked {gib(found.locked_bytes)}",
        f"a denoising step: {step}",
    ]
