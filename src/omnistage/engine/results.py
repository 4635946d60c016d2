"""From the events of a stream to what the caller holds in hand."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from omnistage.contracts.errors import OmniError, RequestCancelledError
from omnistage.contracts.modalities import Modality
from omnistage.contracts.outputs import FinishReason, OmniRequestOutput
from omnistage.contracts.tensors import NOT_IN_NUMPY, HostTensor
from omnistage.engine.answers import AUDIO, Answers, added, is_answer


def materialize(output: OmniRequestOutput) -> OmniRequestOutput:
    """Turn an event's host tensors into PIL images (uint8 images) or numpy arrays, in place.

    The arrays are copies: a mapped segment takes a descriptor, which a kept result must not. A
    dtype that numpy lacks stays a `HostTensor`, whose `.torch()` reads it.
    """
    tensors: dict[str, Any] = {}
    for name, tensor in output.tensors.items():
        array = _array(tensor)
        if output.modality is Modality.IMAGE and name == "images" and _is_uint8(array):
            output.images.extend(Image.fromarray(picture) for picture in array)
        else:
            tensors[name] = array
    output.tensors = tensors
    if isinstance(output.fields.get("text"), str):
        output.text = output.fields["text"]
    if is_answer(output):
        output.outputs = [added(output)]
    return output


def _array(tensor: Any) -> Any:
    if isinstance(tensor, HostTensor) and tensor.dtype not in NOT_IN_NUMPY:
        return tensor.numpy().copy()
    return tensor


def _is_uint8(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype == np.uint8


class ResultCollector:
    """Gathers the final events of one request into one output, in child and output order."""

    def __init__(self, request_id: str, prompt: Any) -> None:
        self._result = OmniRequestOutput(request_id=request_id, prompt=prompt, finished=True)
        self._events: list[OmniRequestOutput] = []
        self._answers = Answers()

    def add(self, output: OmniRequestOutput) -> None:
        self._answers.add(output)
        if not output.partial:
            self._events.append(output)

    def fail(self, error: OmniError) -> OmniRequestOutput:
        self._result.error = error
        cancelled = isinstance(error, RequestCancelledError)
        self._result.finish_reason = FinishReason.ABORT if cancelled else FinishReason.ERROR
        return self._result

    def result(self) -> OmniRequestOutput:
        result = self._result
        for event in sorted(self._events, key=lambda e: (e.child_index, e.output_index)):
            result.images.extend(event.images)
            result.tensors |= event.tensors
            result.fields |= event.fields
            result.modality = event.modality or result.modality
            result.text = event.text if event.text is not None else result.text
            result.stage_id = event.stage_id if event.stage_id is not None else result.stage_id
            result.replica_id = event.replica_id
            result.stage_durations |= event.stage_durations
            result.peak_memory_mb = event.peak_memory_mb or result.peak_memory_mb
            result.finish_reason = event.finish_reason or result.finish_reason
        result.outputs = self._answers.whole()
        if result.outputs and AUDIO in result.tensors:
            del result.tensors[AUDIO]  # The last piece only; the whole is in `outputs`.
        if any(answer.token_ids for answer in result.outputs):
            result.text = result.outputs[0].text
            result.fields["text"] = result.text
            result.finish_reason = result.outputs[0].finish_reason or result.finish_reason
        return result
