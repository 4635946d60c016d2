"""Topology and the seam of process groups."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.errors import (
    ConfigurationError,
    InternalError,
    UnsupportedCombinationError,
)
from omnistage.parallel.groups import open_process_groups, refuse_missing
from omnistage.parallel.overlays import OVERLAYS
from omnistage.parallel.topology import DIMENSIONS, Topology

LATER = [name for name in DIMENSIONS if name not in ("rank", "data", "sequence")]
sizes = st.fixed_dictionaries({f"{name}_parallel_size": st.integers(1, 3) for name in DIMENSIONS})


@pytest.mark.invariant("PARALLEL-INV-001")
@settings(deadline=None, max_examples=30)
@given(sizes)
def test_coordinates_and_ranks_are_each_others_inverse(chosen):
    topology = Topology.of(ParallelConfig(**chosen))
    places = [topology.coordinates(rank) for rank in range(topology.world_size)]
    assert len({tuple(place.items()) for place in places}) == topology.world_size
    assert [topology.rank(place) for place in places] == list(range(topology.world_size))


@pytest.mark.invariant("PARALLEL-INV-003")
@settings(deadline=None, max_examples=30)
@given(sizes, st.sampled_from(DIMENSIONS))
def test_groups_of_a_dimension_hold_every_rank_once(chosen, dimension):
    topology = Topology.of(ParallelConfig(**chosen))
    groups = topology.groups(dimension)
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
    for group in groups:
        assert len(group) == topology.sizes[dimension]
        assert all(topology.group_of(dimension, rank) == group for rank in group)
        places = [topology.coordinates(rank) for rank in group]
        assert [place.pop(dimension) for place in places] == list(range(len(group)))
        assert all(place == places[0] for place in places)


@pytest.mark.invariant("PARALLEL-INV-001")
def test_tensor_ranks_are_neighbours():
    config = ParallelConfig(tensor_parallel_size=2, data_parallel_size=2)
    topology = Topology.of(config)
    assert topology.groups("tensor") == [[0, 1], [2, 3]]
    assert topology.groups("data") == [[0, 2], [1, 3]]


@pytest.mark.invariant("PARALLEL-INV-001")
@pytest.mark.parametrize("name", DIMENSIONS)
@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_names_its_flag(name, size):
    with pytest.raises(ConfigurationError, match=f"--{name}-parallel-size is {size}"):
        Topology.of(ParallelConfig(**{f"{name}_parallel_size": size}))


@pytest.mark.invariant("PARALLEL-INV-001")
def test_places_that_do_not_exist_are_refused():
    topology = Topology.of(ParallelConfig(tensor_parallel_size=2))
    for rank in (-1, 2):
        with pytest.raises(ConfigurationError, match="ranks 0 to 1"):
            topology.coordinates(rank)
    with pytest.raises(ConfigurationError, match="tensor coordinate 2"):
        topology.rank({"tensor": 2})


@pytest.mark.invariant("PARALLEL-INV-001")
def test_ring_is_outside_of_ulysses():
    topology = Topology.of(ParallelConfig(sequence_parallel_size=2, ring_parallel_size=2))
    assert topology.groups("sequence") == [[0, 1], [2, 3]]
    assert topology.groups("ring") == [[0, 2], [1, 3]]


OVERLAID = {
    "expert": (ParallelConfig(sequence_parallel_size=4, expert_parallel_size=2), 2),
    "vae_patch": (ParallelConfig(sequence_parallel_size=4, vae_patch_parallel_size=4), 4),
    "hsdp_shard": (
        ParallelConfig(use_hsdp=True, hsdp_shard_size=2, hsdp_replicate_size=2),
        2,
    ),
    "hsdp_replicate": (
        ParallelConfig(sequence_parallel_size=4, use_hsdp=True, hsdp_replicate_size=2),
        2,
    ),
}


@pytest.mark.invariant("PARALLEL-INV-003")
@pytest.mark.parametrize("name", OVERLAYS)
def test_overlays_group_every_rank_once_and_add_none(name):
    config, size = OVERLAID[name]
    topology = Topology.of(config)
    groups = topology.groups(name)
    assert topology.world_size == config.world_size == 4
    assert topology.size(name) == size
    assert sorted(rank for group in groups for rank in group) == [0, 1, 2, 3]
    assert all(topology.group_of(name, rank) == group for group in groups for rank in group)
    assert groups == sorted(groups)


@pytest.mark.invariant("PARALLEL-INV-003")
def test_replicas_of_a_shard_are_in_different_shard_groups():
    topology = Topology.of(OVERLAID["hsdp_replicate"][0])
    assert topology.groups("hsdp_shard") == [[0, 1], [2, 3]]
    assert topology.groups("hsdp_replicate") == [[0, 2], [1, 3]]


REFUSED = [
    ({"use_hsdp": True, "data_parallel_size": 2}, "--use-hsdp .* --data-parallel-size 2"),
    ({"use_hsdp": True, "tensor_parallel_size": 2}, "--use-hsdp .* --tensor-parallel-size 2"),
    ({"hsdp_shard_size": 2}, "no effect without --use-hsdp"),
    ({"hsdp_replicate_size": 2}, "no effect without --use-hsdp"),
    ({"use_hsdp": True}, "--hsdp-shard-size is -1 for 1 rank"),
    ({"use_hsdp": True, "hsdp_shard_size": 1}, "--hsdp-shard-size is 1"),
    ({"use_hsdp": True, "hsdp_shard_size": 2, "hsdp_replicate_size": 0}, "must be at least 1"),
    (
        {"use_hsdp": True, "hsdp_shard_size": 3, "sequence_parallel_size": 4},
        "3 times --hsdp-replicate-size 1 is not the 4 ranks",
    ),
    ({"expert_parallel_size": 2}, "--expert-parallel-size is 2; it must divide the 1 rank"),
    ({"vae_patch_parallel_size": 3, "data_parallel_size": 2}, "divide the 2 rank"),
]


@pytest.mark.invariant("PARALLEL-INV-001")
@pytest.mark.parametrize(("chosen", "message"), REFUSED)
def test_sizes_that_exclude_each_other_name_their_flags(chosen, message):
    with pytest.raises((ConfigurationError, UnsupportedCombinationError), match=message):
        Topology.of(ParallelConfig(**chosen))


def joined(topology, rank):
    return open_process_groups(topology, rank, device="cpu", rendezvous=None, timeout_s=1.0)


@pytest.mark.invariant("PARALLEL-INV-004")
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_without_collectives_join_no_group(ranks):
    import torch.distributed as dist

    topology = Topology.of(ParallelConfig(rank_parallel_size=ranks))
    groups = [joined(topology, rank) for rank in range(ranks)]
    assert [group.rank for group in groups] == list(range(ranks))
    assert not dist.is_initialized()
    for group in groups:
        with pytest.raises(InternalError, match="alone"):
            group.group_of("data")
        group.close()
        group.close()


@pytest.mark.invariant("PARALLEL-INV-004")
@pytest.mark.parametrize("name", LATER)
def test_dimensions_to_come_are_refused_by_their_flag(name):
    topology = Topology.of(ParallelConfig(**{f"{name}_parallel_size": 2}))
    with pytest.raises(UnsupportedCombinationError, match=f"--{name}-parallel-size 2 is not there"):
        joined(topology, 0)


@pytest.mark.invariant("PARALLEL-INV-004")
@pytest.mark.parametrize("name", OVERLAYS)
def test_overlays_to_come_are_refused_by_their_flag(name):
    with pytest.raises(UnsupportedCombinationError, match="is not there yet"):
        refuse_missing(Topology.of(OVERLAID[name][0]))
