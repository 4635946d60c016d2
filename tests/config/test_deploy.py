"""Deploy files, bundled and one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnistage.config.deploy import bundled_deploys, load_deploy
from omnistage.contracts.errors import ConfigurationError
from tests.config.pipelines import resolve, two_stage_pipeline


def test_a_file_is_found_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("max_num_seqs: 3\nstages:\n- stage_id: 0\n  dtype: float32\n")
    deploy = load_deploy(path)
    assert deploy.stage_defaults == {"max_num_seqs": 3}
    assert deploy.stages == {0: {"dtype": "float32"}}
    assert deploy.origin == str(path)


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    assert load_deploy(path).stage_defaults == {}


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("dtipe: 3\n")
    with pytest.raises(ConfigurationError) as caught:
        load_deploy(path)
    assert caught.value.message == (f"deploy file {path}: unknown key dtipe; did you mean 'dtype'?")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "not valid YAML"),
        ("a: !!python/object/apply:os.system ['true']", "not valid YAML: could not determine"),
        ("? [1]\n: 2", "a key must be a plain value"),
    ],
)
def test_malformed_yaml(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        load_deploy(path)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read deploy file .*No such file"):
        load_deploy(tmp_path / "none.yaml")


def test_a_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="not UTF-8 text"):
        load_deploy(path)


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'single_process'"):
        load_deploy("single-proces")


@pytest.mark.invariant("DEPLOY-INV-001")
@pytest.mark.parametrize("name", bundled_deploys())
def test_every_bundled_file_loads_and_declares_its_version(name: str) -> None:
    import omnistage

    deploy = load_deploy(name)
    path = Path(omnistage.__file__).parent / "deploys" / f"{name}.yaml"
    assert "schema_version: 1" in path.read_text()
    assert deploy.origin == f"{name}.yaml (bundled)"


@pytest.mark.invariant("DEPLOY-INV-002")
def test_the_annotated_file_spells_out_the_defaults() -> None:
    import omnistage
    from omnistage.config.schema import OFFLOAD_FLAGS, PARALLEL_KEYS, STAGE_KEYS

    path = Path(omnistage.__file__).parent / "deploys" / "separate_processes.yaml"
    spelled = resolve(two_stage_pipeline(), yaml=path.read_text())
    assert spelled == resolve(two_stage_pipeline())
    optional = {"devices", "max_num_seqs", "default_sampling_params", "options"}
    optional |= {*PARALLEL_KEYS, *OFFLOAD_FLAGS}
    assert set(load_deploy("separate_processes").stage_defaults) == set(STAGE_KEYS) - optional


@pytest.mark.invariant("DEPLOY-INV-003")
def test_placements_of_the_bundled_files() -> None:
    def processes(name: str) -> list[str]:
        import omnistage

        path = Path(omnistage.__file__).parent / "deploys" / f"{name}.yaml"
        config = resolve(two_stage_pipeline(), yaml=path.read_text())
        return [stage.process for stage in config.stages]

    assert processes("single_process") == ["inline", "inline"]
    assert processes("shared_process") == ["stages", "stages"]
    assert processes("separate_processes") == ["stage-0", "stage-1"]
