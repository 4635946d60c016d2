"""Topology and the seam of process groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.config.resolved import ParallelConfig
from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from omnistage.parallel.groups import open_process_groups
from omnistage.parallel.topology import DIMENSIONS, Topology

sizes = st.fixed_dictionaries({f"{name}_parallel_size": st.integers(1, 3) for name in DIMENSIONS})


@pytest.mark.invariant("PARALLEL-INV-001")
@given(sizes)
def test_coordinates_and_ranks_are_each_others_inverse(chosen):
    topology = Topology.of(ParallelConfig(**chosen))
    places = [topology.coordinates(rank) for rank in range(topology.world_size)]
    assert len({tuple(place.items()) for place in places}) == topology.world_size
    assert [topology.rank(place) for place in places] == list(range(topology.world_size))


@pytest.mark.invariant("PARALLEL-INV-003")
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


@pytest.mark.invariant("PARALLEL-INV-004")
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_without_collectives_join_no_group(ranks):
    topology = Topology.of(ParallelConfig(rank_parallel_size=ranks))
    groups = [open_process_groups(topology, rank) for rank in range(ranks)]
    assert [group.rank for group in groups] == list(range(ranks))
    for group in groups:
        group.close()
        group.close()


@pytest.mark.invariant("PARALLEL-INV-004")
@pytest.mark.parametrize("name", [name for name in DIMENSIONS if name != "rank"])
def test_dimensions_to_come_are_refused_by_their_flag(name):
    topology = Topology.of(ParallelConfig(**{f"{name}_parallel_size": 2}))
    with pytest.raises(UnsupportedCombinationError, match=f"--{name}-parallel-size 2 is not there"):
        open_process_groups(topology, 0)
