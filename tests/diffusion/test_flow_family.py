"""What families of flow matching share, apart from parity."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from omnistage.models.qwen_image.steps import QwenImageSteps


class Autoencoder:
    config = SimpleNamespace(latents_mean=[1.0, 2.0], latents_std=[2.0, 4.0])

    def decode(self, latents, return_dict):
        assert not return_dict
        return (latents,)


def test_decoding_brings_nothing_to_the_device_after_the_first_time(monkeypatch):
    family = QwenImageSteps(SimpleNamespace(transformer=None, vae=Autoencoder()))
    latents = torch.ones(3, 2, 1, 4, 4)
    first = family.decode_normalized(latents)
    assert first.shape == (3, 2, 4, 4)
    assert (first[:, 0] == 3).all()
    assert (first[:, 1] == 6).all()

    def refuse(*args, **kwargs):
        raise AssertionError("waits for the device")

    monkeypatch.setattr(torch, "tensor", refuse)
    assert torch.equal(family.decode_normalized(latents), first)
