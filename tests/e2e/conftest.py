"""One plain server for all modules that need nothing special of theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.serving import Server, serving

CHEAP = '{"width": 16, "height": 16, "num_inference_steps": 2}'
"""What a request leaves open must not cost seconds: the pipeline's own size is 1024 x 1024."""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, "--log-json", "--default-sampling-params", CHEAP) as running:
        yield running
