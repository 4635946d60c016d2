"""`omnistage cache`: what is there, whether it is sound, and what goes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from omnistage.cli.main import main
from omnistage.memory.cache.location import weight_cache_folder
from omnistage.memory.cache.store import WeightStore
from omnistage.memory.cache.writer import IN_USE_NAME
from tests.memory.cache.making import KEY, OTHER_KEY, publish


class Cache:
    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.store = WeightStore(weight_cache_folder(str(folder)))
        self._capsys = capsys

    def __call__(self, *words: str) -> tuple[int, str, str]:
        code = main(["cache", *words, "--weight-cache-dir", str(self.folder)])
        out, err = self._capsys.readouterr()
        return code, out, err

    def fill(self) -> list[str]:
        """Two entries, the first used ten days ago; their names."""
        names = []
        for seed, key in enumerate((KEY, OTHER_KEY)):
            weights = publish(self.store, key, seed=seed)
            names.append(weights.entry.folder.name)
            weights.close()
        lock = self.store.folders.entries / names[0] / IN_USE_NAME
        then = lock.stat().st_mtime - 10 * 86_400
        os.utime(lock, (then, then))
        return names

    def names(self) -> list[str]:
        return sorted(path.name for path in self.store.folders.entries.glob("*"))


@pytest.fixture
def cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cache:
    return Cache(tmp_path / "cache", capsys)


def test_nothing_there(cache: Cache) -> None:
    assert cache("ls") == (0, f"0 entries, 0.0 MiB, in {cache.store.folders.root}\n", "")
    assert cache("verify")[0] == 0
    code, out, _ = cache("prune", "--all")
    assert (code, out.startswith("nothing to remove")) == (0, True)
    assert not cache.folder.exists(), "looking makes nothing"


def test_ls(cache: Cache) -> None:
    old, new = cache.fill()
    code, out, _ = cache("ls")
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines[:-1]] == [new[:12], old[:12]]
    assert "transformer, tests.Tiny, used 10 days ago" in lines[1]
    assert lines[2].startswith("2 entries")
    opened = cache.store.open(KEY)
    assert opened is not None
    report = json.loads(cache("ls", "--json")[1])
    by_name = {entry["name"]: entry for entry in report["entries"]}
    assert set(by_name) == {old, new}
    assert by_name[old]["in_use"]
    assert not by_name[new]["in_use"]
    assert by_name[new]["blocks"] == 3
    assert report["bytes"] == sum(entry["bytes"] for entry in by_name.values())
    opened.close()


@pytest.mark.invariant("CACHE-INV-004")
def test_verify_names_what_is_damaged(cache: Cache) -> None:
    old, new = cache.fill()
    assert cache("verify")[0] == 0
    file = next((cache.store.folders.entries / old).glob("*.safetensors"))
    file.chmod(0o644)
    with file.open("r+b") as output:
        output.seek(4096 + 10)
        output.write(b"\xff")
    code, out, _ = cache("verify")
    assert code == 1
    assert f"{old[:12]}  DAMAGED: {file.name}: blocks.0 differs from its digest" in out
    assert f"{new[:12]}  ok" in out
    assert "2 verified, 1 damaged" in out
    assert cache("verify", new[:8])[0] == 0
    file.unlink()
    code, out, _ = cache("verify", old)
    assert (code, f"{file.name} is missing" in out) == (1, True)
    assert cache.names() == sorted([old, new]), "verifying removes nothing"
    code, _, err = cache("verify", "zzz")
    assert code == 2
    assert "no entry begins with 'zzz'; there are: " in err


@pytest.mark.invariant("CACHE-INV-007")
def test_prune(cache: Cache) -> None:
    old, new = cache.fill()
    opened = cache.store.open(OTHER_KEY)
    assert opened is not None
    assert cache("prune", "--limit-gib", "1")[1].startswith("0.0 MiB removed")
    code, out, _ = cache("prune", "--older-than", "9")
    assert code == 0
    assert f"removed {old[:12]}" in out
    assert cache.names() == [new]
    assert list(cache.store.folders.index.iterdir()) == [cache.store.folders.index_of(OTHER_KEY)]
    for words in (["--all"], ["--limit-gib", "0"]):
        code, out, _ = cache("prune", *words)
        assert code == 0
        assert f"left    {new[:12]}" in out
        assert "in use" in out
        assert cache.names() == [new]
    opened.close()
    (cache.store.folders.tmp / f"{KEY}.left").mkdir()
    code, out, _ = cache("prune", "--all")
    assert f"removed {new[:12]}" in out
    assert "removed 1 unfinished" in out
    assert cache.names() == []
    assert list(cache.store.folders.index.iterdir()) == []
    assert list(cache.store.folders.tmp.iterdir()) == []


@pytest.mark.invariant("CACHE-INV-007")
def test_prune_to_a_limit_takes_the_least_recently_used(cache: Cache) -> None:
    _, new = cache.fill()
    nbytes = json.loads(cache("ls", "--json")[1])["bytes"]
    cache("prune", "--limit-gib", str(nbytes * 0.7 / 2**30))
    assert cache.names() == [new]


@pytest.mark.invariant("CLI-INV-100")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prune"], "needs one of --limit-gib N, --older-than DAYS and --all"),
        (["prune", "--all", "--limit-gib", "1"], "needs one of"),
        (["prune", "abc", "--all"], "takes no ENTRY"),
        (["ls", "--all"], "cache ls takes no --all"),
        (["verify", "--json"], "cache verify takes no --json"),
        (["prune", "--limit-gib", "-1"], "'-1' is no number of at least 0"),
        (["remove"], "invalid choice: 'remove'"),
        ([], "action"),
    ],
)
def test_refusals(cache: Cache, words: list[str], message: str) -> None:
    code, out, err = cache(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_folder_that_cannot_be_is_refused(cache: Cache) -> None:
    cache.folder.mkdir()
    (cache.folder / "weights").write_text("")
    assert cache("ls")[0] == 0
    (cache.folder / "weights").unlink()
    cache.store.folders.root.mkdir()
    cache.store.folders.locks.write_text("")
    code, _, err = cache("prune", "--all")
    assert code == 2
    assert "cannot be used" in err


@pytest.mark.parametrize(
    ("setting", "variables", "expected"),
    [
        ("/here", {"OMNISTAGE_CACHE": "/there", "XDG_CACHE_HOME": "/x"}, "/here/weights"),
        (None, {"OMNISTAGE_CACHE": "/there", "XDG_CACHE_HOME": "/x"}, "/there/weights"),
        (None, {"XDG_CACHE_HOME": "/x"}, "/x/omnistage/weights"),
        (None, {"HOME": "/home/me"}, "/home/me/.cache/omnistage/weights"),
        ("~/c", {"HOME": "/home/me"}, "/home/me/c/weights"),
    ],
)
def test_where_it_lies(
    monkeypatch: pytest.MonkeyPatch,
    setting: str | None,
    variables: dict[str, str],
    expected: str,
) -> None:
    for name in ("OMNISTAGE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert weight_cache_folder(setting) == Path(expected)
