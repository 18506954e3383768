"""Where a process stands among the ranks, by the variables of every launcher."""

from __future__ import annotations

import pytest

from tandem.distributed.placement import VARIABLES, Placement, counts_hosts, first_host, visible_accelerators
from tandem.errors import ConfigError

TORCHRUN = {
    "RANK": "9",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "gpu01",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "12",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8,4",
    "SLURM_STEP_NODELIST": "gpu[07,12]",
    "SLURM_JOB_ID": "123456",
}


def placement(**environ: str) -> Placement:
    parsed = Placement.from_environment(environ)
    assert parsed is not None
    return parsed


def test_a_process_of_torchrun() -> None:
    assert placement(**TORCHRUN, TORCHELASTIC_RUN_ID="none") == Placement(
        rank=9,
        world_size=16,
        local_rank=1,
        local_world_size=8,
        master_addr="gpu01",
        master_port=29500,
        launcher="torchrun",
    )


def test_the_same_variables_without_torchrun() -> None:
    assert placement(**TORCHRUN).launcher == "environment"
    assert placement(**TORCHRUN, TANDEM_LAUNCHER="ray").launcher == "ray"


def test_a_place_is_found_again_in_the_variables_that_it_sets() -> None:
    one = placement(**TORCHRUN, TANDEM_LAUNCHER="tandem")
    assert placement(**one.environment()) == one


def test_a_task_of_srun() -> None:
    assert placement(**SLURM) == Placement(
        rank=9,
        world_size=12,
        local_rank=1,
        local_world_size=4,
        master_addr="gpu07",
        master_port=12_000 + 123456 % 20_000,
        launcher="slurm",
    )


def test_all_hosts_of_a_step_meet_at_the_same_place() -> None:
    first = placement(**SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    other = placement(**SLURM)
    assert (first.master_addr, first.master_port) == (other.master_addr, other.master_port)
    assert (first.local_world_size, other.local_world_size) == (8, 4)
    assert (first.is_lead, other.is_lead) == (True, False)


def test_torchrun_under_srun() -> None:
    assert placement(**SLURM, **TORCHRUN, TORCHELASTIC_RUN_ID="7").launcher == "torchrun"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "gpu01", "MASTER_PORT": "29500"},
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"},
        SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    ],
    ids=["none", "a meeting place", "a world of one", "a notebook's", "a batch script", "one task of srun"],
)
def test_a_process_that_no_launcher_placed(environ: dict[str, str]) -> None:
    assert Placement.from_environment(environ) is None


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"but not {name}; a launcher such as torchrun"):
        Placement.from_environment({key: text for key, text in TORCHRUN.items() if key != name})


def test_a_rank_alone_is_half_an_environment() -> None:
    with pytest.raises(ConfigError, match="has RANK=0, but not LOCAL_RANK and WORLD_SIZE and"):
        Placement.from_environment({"RANK": "0"})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "16"}, "RANK': '16', .*expected 0 <= LOCAL_RANK <= RANK < WORLD_SIZE"),
        ({"RANK": "-1"}, "RANK': '-1'"),
        ({"LOCAL_RANK": "8"}, "LOCAL_RANK': '8', .*LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "17"}, "LOCAL_WORLD_SIZE': '17'"),
        ({"RANK": "0"}, "RANK': '0'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http is not a whole number"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two is not a whole number"),
    ],
)
def test_variables_that_contradict_one_another(changed: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Placement.from_environment(TORCHRUN | changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLURM_PROCID": ""}, "but not SLURM_PROCID; srun sets all"),
        ({"SLURM_PROCID": "12"}, "of slurm contradict .*RANK': '12'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "8"}, "SLURM_STEP_TASKS_PER_NODE=8 and SLURM_NODEID=1 do not fit SLURM_NTASKS"),
        ({"SLURM_STEP_TASKS_PER_NODE": "many"}, "=many and .* expected tasks per host"),
    ],
)
def test_slurms_variables_that_contradict_one_another(changed: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Placement.from_environment(SLURM | changed)


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("gpu[01-03,7]", "gpu01"),
        ("gpu7,gpu8", "gpu7"),
        ("a-1.cluster,b[1-2]", "a-1.cluster"),
        ("r[2-3]n[08-10]", "r2n08"),
        ("node-[8]-ib", "node-8-ib"),
    ],
)
def test_the_first_host_of_a_node_list(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first


@pytest.mark.parametrize(
    ("changed", "counts"),
    [({}, True), ({"LOCAL_RANK": "1"}, False), ({"NNODES": "3"}, False), ({"NODE_RANK": ""}, False)],
)
def test_a_platform_may_number_hosts_as_ranks(changed: dict[str, str], counts: bool) -> None:
    platform = {"NNODES": "2", "NODE_RANK": "1", "WORLD_SIZE": "2", "RANK": "1"}
    assert counts_hosts(platform | changed) is counts


def test_a_recipes_ranks_agree_with_the_launcher() -> None:
    one = placement(**TORCHRUN, TORCHELASTIC_RUN_ID="none")
    for ranks in (None, "auto", 16):
        one.check_ranks(ranks)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ranks: 8, but torchrun started 16 processes"):
        one.check_ranks(8)
    with pytest.raises(ConfigError, match="slurm started 12 processes"):
        placement(**SLURM).check_ranks(1)


@pytest.mark.parametrize(
    ("devices", "visible"),
    [
        ("", []),
        ("-1", []),
        ("3", ["3"]),
        ("0, 2", ["0", "2"]),
        ("1,0,-1,2", ["1", "0"]),
        ("GPU-8f2,MIG-1", ["GPU-8f2", "MIG-1"]),
    ],
)
def test_accelerators_are_those_that_cuda_sees(devices: str, visible: list[str]) -> None:
    assert visible_accelerators({"CUDA_VISIBLE_DEVICES": devices}) == visible
