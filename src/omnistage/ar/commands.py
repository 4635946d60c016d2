"""The commands of a token stage, as `ar.step` says what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omnistage.ar.sequence import TokenSequence
from omnistage.ar.step import COLLECT, DESCRIBE, ENCODE, PREPARE, STEP, StepPlan
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command, StageRequest


def describe() -> Command:
    return _command(DESCRIBE, "control", ())


def prepare(sequences: Sequence[TokenSequence]) -> Command:
    requests = [
        StageRequest(
            identity=one.identity,
            data=one.first_input,
            params=one.params,
            input_complete=one.input_complete,
        )
        for one in sequences
    ]
    return _command(PREPARE, "encode", sequences, requests=requests)


def encode(sequence: TokenSequence) -> Command:
    return _command(
        ENCODE, "encode", (sequence,), identity=sequence.identity, prompt=sequence.prompt
    )


def step(plan: StepPlan, sequences: Sequence[TokenSequence]) -> Command:
    return _command(STEP, "step", sequences, plan=plan)


def collect() -> Command:
    return _command(COLLECT, "step", ())


def _command(name: str, kind: str, sequences: Sequence[TokenSequence], **fields: Any) -> Command:
    return Command(
        name=name,
        kind=kind,
        identities=tuple(one.identity for one in sequences),
        data=StageData(modality=Modality.TOKENS, fields=fields),
    )
