"""What cannot start ends with one clear line and exit code 2, and leaves nothing running."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.checkpoints import broken
from tests.checkpoints.store import checkpoint
from tests.cli.running import run, the_error

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}

Prepare = Callable[[Path], list[str]]


def tiny() -> str:
    return str(checkpoint("qwen_image"))


def damaged(how: broken.Damage) -> Prepare:
    return lambda folder: ["serve", str(how(checkpoint("qwen_image"), folder / "m")), "--port", "0"]


def missing_package(folder: Path) -> list[str]:
    """A class of diffusers for which this environment lacks onnxruntime."""
    target = folder / "m"
    shutil.copytree(checkpoint("qwen_image"), target)
    index = json.loads((target / "model_index.json").read_text())
    index["_class_name"] = "OnnxStableDiffusionPipeline"
    (target / "model_index.json").write_text(json.dumps(index))
    return ["serve", str(target), "--port", "0"]


def empty_folder(folder: Path) -> list[str]:
    (folder / "m").mkdir()
    return ["serve", str(folder / "m")]


def deploy_file(text: str) -> Prepare:
    def write(folder: Path) -> list[str]:
        (folder / "d.yaml").write_text(text)
        return ["serve", tiny(), "--deploy-config", str(folder / "d.yaml")]

    return write


def words(*arguments: str) -> Prepare:
    return lambda folder: list(arguments)


def serving(*arguments: str) -> Prepare:
    return lambda folder: ["serve", tiny(), "--port", "0", *arguments]


BEFORE_LOADING: dict[str, tuple[Prepare, str]] = {
    "missing path": (words("serve", "/no/such/model"), "'/no/such/model' is neither"),
    "missing relative path": (words("serve", "./nothing"), "'./nothing'"),
    "unknown hub id": (words("serve", "no-such/model"), "model 'no-such/model' is no local"),
    "a file": (words("serve", __file__), "is a file"),
    "an empty folder": (empty_folder, "it has no model_index.json; found: nothing"),
    "no pipeline": (
        damaged(broken.not_a_pipeline),
        "has no model_index.json, and its config.json names no",
    ),
    "unknown pipeline class": (damaged(broken.unknown_pipeline_class), "'NoSuchPipeline'"),
    "no GPU": (serving("--device", "cuda"), "no GPU is usable on this machine; use --device cpu"),
    "no such GPU": (serving("--devices", "cuda:7"), "device cuda:7 does not exist"),
    "wrong value": (serving("--max-num-seqs", "0"), "max_num_seqs is '0'; expected int >= 1"),
    "unknown stage": (serving("--stage-3.process", "inline"), "names stage 3, but"),
    "impossible": (serving("--process", "inline", "--num-replicas", "2"), "cannot have 2 replicas"),
    "unknown key": (deploy_file("max_num_seq: 1"), "did you mean 'max_num_seqs'?"),
    "bad yaml": (deploy_file("a: [1"), "not valid YAML"),
    "tensor parallelism": (
        serving("--device", "cpu", "--tensor-parallel-size", "2"),
        "--tensor-parallel-size 2 is not there yet; allowed: 1",
    ),
    "ranks": (
        serving("--device", "cpu", "--rank-parallel-size", "2"),
        "--rank-parallel-size 2: a diffusion stage divides no work by itself",
    ),
    "offload on a CPU": (
        serving("--device", "cpu", "--enable-layerwise-offload"),
        "offload 'layerwise' on cpu: on a CPU host and device memory are the same; leave it out",
    ),
    "two strategies": (
        serving("--device", "cpu", "--enable-cpu-offload", "--offload", "layerwise"),
        "enable_cpu_offload means offload 'model', but offload is 'layerwise'",
    ),
    "a batch that nothing joins": (
        serving("--request-batch-max-wait-ms", "20"),
        "request_batch_max_wait_ms=20 has no effect with max_num_seqs=1",
    ),
    "a wait for a batch that requests join at any time": (
        serving("--step-execution", "--request-batch-max-wait-ms", "20"),
        "request_batch_max_wait_ms=20 has no effect in step mode",
    ),
    "previews that have no place": (
        serving("--diffusion-streaming-output", "--output-window", "1"),
        "output_window=1 leaves no place for previews",
    ),
    "a wait that nobody may plan either": (
        lambda folder: ["plan", tiny(), "--request-batch-max-wait-ms", "20"],
        "request_batch_max_wait_ms=20 has no effect with max_num_seqs=1",
    ),
    "bad port": (serving("--port", "99999"), "port 99999 does not exist"),
    "bad host": (serving("--host", "256.0.0.1"), "no address"),
    "bad media folder": (serving("--allowed-local-media-path", "/none"), "/none is no directory"),
    "output kind": (
        words("generate", "--prompt", "x", "--output", "cat.pmg"),
        "must end in one of .png, .jpg, .jpeg, .webp, .wav; did you mean '.png'?",
    ),
    "output folder": (
        words("generate", "--prompt", "x", "--output", "/no/such/cat.png"),
        "folder /no/such does not exist",
    ),
    "no input picture": (
        words("generate", "--prompt", "x", "--image", "/none.png"),
        "--image /none.png does not exist",
    ),
    "input that is no picture": (
        words("generate", "--prompt", "x", "--image", __file__),
        "cannot be read as a picture",
    ),
    "nobody there": (
        words("bench", "--url", "http://127.0.0.1:9", "--requests", "1"),
        "no server answers at http://127.0.0.1:9",
    ),
}

WHILE_LOADING: dict[str, tuple[Prepare, str]] = {
    "corrupt safetensors": (damaged(broken.corrupt_safetensors), "safetensors"),
    "truncated safetensors": (damaged(broken.truncated_safetensors), "safetensors"),
    "missing tensor": (damaged(broken.missing_tensor), "transformer"),
    "missing component": (damaged(broken.missing_component_folder), "'transformer'"),
    "missing package": (missing_package, "pip install onnxruntime"),
}


@pytest.mark.invariant("CLI-INV-100")
@pytest.mark.parametrize("case", BEFORE_LOADING)
def test_refused_before_loading(case: str, tmp_path: Path) -> None:
    prepare, message = BEFORE_LOADING[case]
    ended = run(prepare(tmp_path), env=NO_GPU)
    assert message in the_error(ended)
    assert ended.code == 2
    assert ended.out == ""


@pytest.mark.slow
@pytest.mark.invariant("CLI-INV-100")
@pytest.mark.parametrize("case", WHILE_LOADING)
def test_refused_while_loading(case: str, tmp_path: Path) -> None:
    prepare, message = WHILE_LOADING[case]
    ended = run(prepare(tmp_path), env=NO_GPU)
    assert message in the_error(ended)
    assert ended.code == 2
    assert ended.out == ""


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.invariant("CLI-INV-100")
def test_a_taken_port_is_refused_before_the_model_loads(taken_port: int) -> None:
    ended = run(["serve", tiny(), "--port", str(taken_port)], env=NO_GPU)
    assert the_error(ended) == (
        f"port {taken_port} on 127.0.0.1 is taken; use --port to choose another"
    )
    assert ended.code == 2


@pytest.mark.invariant("CLI-INV-100")
def test_a_traceback_is_there_for_those_who_ask() -> None:
    ended = run(["serve", "/no/such/model"], env={"OMNISTAGE_TRACEBACK": "1"})
    assert "Traceback" in ended.err
    assert ended.err.splitlines()[-1].startswith("omnistage: error: model '/no/such/model'")
    assert ended.code == 2
