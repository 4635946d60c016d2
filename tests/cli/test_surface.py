"""The command line as a public surface: a change here is a change for users."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import omnistage
from omnistage.cli.main import COMMANDS, main, usage
from tests.cli.test_parsing import parser_of

DEPLOYMENT = """
--deploy-config --stage-overrides --device --devices --num-replicas --process --dtype
--max-num-seqs --output-window --connector --shm-threshold-bytes --memory-budget-gib --offload
--enforce-eager --no-enforce-eager --step-execution --no-step-execution
--request-batch-max-wait-ms --diffusion-streaming-output --no-diffusion-streaming-output
--init-timeout --stage-init-timeout --init-timeout-s
--heartbeat-timeout --heartbeat-timeout-s --omni-heartbeat-timeout --operation-limits
--operation-limits-s --restart --default-sampling-params --options --tensor-parallel-size
--sequence-parallel-size --ulysses-degree --usp --ring-parallel-size --ring-degree
--ring --data-parallel-size --pipeline-parallel-size
--cfg-parallel-size --rank-parallel-size --served-model-name --lb-policy --omni-lb-policy
--log-level --log-json --no-log-json --limits --max-inflight-requests --max-queue
--request-timeout-s --slow-client-timeout-s --abort-timeout-s --shutdown-timeout-s --stream-buffer
--vae-use-tiling
--no-vae-use-tiling --vae-use-slicing --no-vae-use-slicing --omni
--async-chunk --async-scheduling --block-size --enable-chunked-prefill --enable-prefix-caching
--fuse-layers
--gpu-memory-utilization --kv-cache-gib --max-model-len --max-num-batched-tokens --no-async-chunk
--no-async-scheduling --no-enable-chunked-prefill --no-enable-prefix-caching --no-fuse-layers
--memory --enable-cpu-offload --no-enable-cpu-offload --enable-layerwise-offload
--no-enable-layerwise-offload --enable-distributed-layerwise-offload
--no-enable-distributed-layerwise-offload --dlo-use-allgather --no-dlo-use-allgather
--dlo-no-use-allgather --dlo-resident-layers --dlo-runtime-cache --dlo-runtime-cache-pin-limit-gib
--weight-cache-dir --weight-cache-limit-gib --quantization-config --quantization
--diffusion-quantization-config --expert-parallel-size --vae-patch-parallel-size --use-hsdp
--no-use-hsdp --hsdp-shard-size --hsdp-replicate-size
"""

FLAGS = {
    "serve": DEPLOYMENT
    + """
--host --port --api-key --max-generated-image-size --max-steps --max-n --max-prompt-chars
--max-body-bytes --max-open-requests --max-input-images --max-media-bytes --media-threads
--max-input-audios --max-input-audio-s --max-input-videos --max-video-frames
--max-video-file-frames --video-frame-pixels --video-fps --max-speech-chars
--media-decode-timeout-s --body-timeout-s --media-timeout-s --drain-timeout-s
--allow-private-media --allow-http-media
--allowed-local-media-path --stop-with-stdin --max-choices --tool-call-parser --reasoning-parser
""",
    "generate": DEPLOYMENT
    + """
--prompt --output --negative-prompt --size --steps --seed --n --guidance-scale --true-cfg-scale
--strength --scheduler --image --extra-args --no-progress
--max-tokens --temperature --top-p --top-k --system --raw
""",
    "plan": DEPLOYMENT
    + """
--config-only --json --size --height --width --frames --steps --requests --device-memory-gib
--link-gib-s --host-memory-gib --device-label
""",
    "doctor": "--json --quick",
    "demo": "--prompt --seed --output-dir",
    "bench": DEPLOYMENT
    + """
--url --peer-url --peer-model --api-key --requests --concurrency --warmup --rounds --size --steps
--n --timeout-s --target
""",
    "cache": "--weight-cache-dir --json --limit-gib --older-than --all",
}


@pytest.mark.invariant("CLI-INV-200")
def test_the_commands() -> None:
    assert list(COMMANDS) == ["serve", "generate", "plan", "doctor", "demo", "bench", "cache"]
    assert list(FLAGS) == list(COMMANDS)


@pytest.mark.invariant("CLI-INV-200")
@pytest.mark.parametrize("command", COMMANDS)
def test_the_flags_of_a_command(command: str) -> None:
    assert sorted(parser_of(command).flag_names()) == sorted(
        [*FLAGS[command].split(), "-h", "--help"]
    )


@pytest.mark.invariant("CLI-INV-200")
def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        assert capsys.readouterr().out == usage()
    for words in (["--version"], ["-V"]):
        assert main(words) == 0
        assert capsys.readouterr().out == f"omnistage {omnistage.__version__}\n"
    assert all(name in usage() and meaning in usage() for name, meaning in COMMANDS.items())


@pytest.mark.invariant("CLI-INV-002")
@pytest.mark.parametrize("words", [["--help"], *[[name, "--help"] for name in COMMANDS]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    code = f"""
import json, sys
from omnistage.cli.main import main
try:
    main({words!r})
except SystemExit:
    pass
heavy = ("torch", "diffusers", "transformers", "numpy", "fastapi", "zmq", "PIL", "httpx")
print(json.dumps([name for name in heavy if name in sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []
