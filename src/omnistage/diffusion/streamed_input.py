"""Input that arrives in pieces: collected until it is complete."""

from __future__ import annotations

from dataclasses import dataclass

from omnistage.contracts.payloads import StageData


@dataclass(slots=True)
class InputBuffer:
    """A whole pipeline call needs its whole input, so pieces are joined: "prompt" texts in
    sequence, other fields and tensors by name. A piece of a later epoch replaces everything before
    it; one of an earlier epoch is dropped."""

    data: StageData
    complete: bool
    epoch: int = 0

    def append(self, data: StageData, epoch: int) -> None:
        if epoch < self.epoch or self.complete:
            return
        if epoch > self.epoch:
            self.epoch, self.data = epoch, data
            return
        fields = {**self.data.fields, **data.fields}
        texts = [piece.fields["prompt"] for piece in (self.data, data) if "prompt" in piece.fields]
        if texts:
            fields["prompt"] = "".join(texts)
        self.data = StageData(
            modality=self.data.modality,
            fields=fields,
            tensors={**self.data.tensors, **data.tensors},
        )

    def end(self, epoch: int) -> None:
        if epoch >= self.epoch:
            self.complete = True
