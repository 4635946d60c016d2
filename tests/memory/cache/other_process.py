"""A second process at the same store: it says what it does on standard output, and waits there
until it gets a line.

    python -m tests.memory.cache.other_process write|read FOLDER
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEADLINE_S = 60


def pause(word: str) -> None:
    print(word, flush=True)
    sys.stdin.readline()


def main(action: str, folder: str) -> None:
    from omnistage.memory.cache.store import WeightStore
    from tests.memory.cache.making import KEY, assert_holds, blocks, facts, layouts

    store = WeightStore(Path(folder), shard_bytes=1)

    def slowly():  # type: ignore[no-untyped-def]
        for index, block in enumerate(blocks()):
            if index == 2:
                pause("writing")
            yield block

    if action == "write":
        weights = store.publish(KEY, layouts(), slowly(), facts())
    else:
        opened = store.open(KEY)
        assert opened is not None
        weights = opened
        pause("reading")
    assert_holds(weights)
    weights.close()
    print("done", flush=True)


@contextmanager
def other_process(action: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Runs, and has come to its pause."""
    child = subprocess.Popen(
        [sys.executable, "-m", __name__, action, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline().strip() in ("writing", "reading")
        yield child
    finally:
        child.kill()
        child.communicate()


def let_go(child: subprocess.Popen[str]) -> None:
    out, _ = child.communicate("\n", timeout=DEADLINE_S)
    assert out.strip() == "done"
    assert child.returncode == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
