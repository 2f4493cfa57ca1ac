"""`doctor` on sharded models, where ranks differ, and where they could wait for each other."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from nf4tensor import NF4Tensor, doctor, memory_footprint, to_nf4
from nf4tensor.errors import ShardingError
from tests.fsdp.doctoring import adamw, apply_fix, backward, checks, lora_model
from tests.fsdp.training import WIDTH, shard
from tests.ranks import Ranks

UP = "blocks.0.up.base.weight"
two_or_more = pytest.mark.parametrize("ranks", [2, 3], indirect=True)


def healthy(rank, world_size):
    meshes = [None]
    if world_size == 4:
        meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    for mesh in meshes:
        whole = lora_model()
        num_bytes = doctor(whole).bytes_by_role
        model = shard(lora_model(), **({"mesh": mesh} if mesh else {}))
        shards = 2 if mesh else world_size
        optimizer = adamw(model)
        for _ in range(2):
            gathered = []
            with torch.no_grad():
                model(torch.ones(2, WIDTH))  # leaves the root gathered
            gathered.append(doctor(model, optimizer=optimizer, check_ranks=True))
            assert gathered[0].bytes_by_role["gathered now"] > 0
            backward(model)
            optimizer.step()
            model.reshard()
            report = doctor(model, optimizer=optimizer, check_ranks=True)
            for found in (*gathered, report):
                found.assert_healthy()
                assert not found.findings
                assert found.num_shards == (shards,)
                assert (found.num_quantized, found.num_parameters) == (7, 34)
        roles = report.bytes_by_role
        assert "gathered now" not in roles
        kinds = ("4-bit weights", "adapters", "other frozen")
        assert sum(roles[kind] for kind in kinds) == memory_footprint(model)
        for kind in kinds:
            assert num_bytes[kind] / shards <= roles[kind] <= num_bytes[kind] / shards + 2**14
        start = (
            f", sharded over {shards} of {world_size} ranks: healthy\n" if shards > 1 else "4-bit"
        )
        assert start in str(report)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4], indirect=True)
def test_a_healthy_sharded_model_has_no_findings(ranks: Ranks):
    ranks.run(healthy)


def partly_sharded(rank, world_size):
    model = lora_model()
    assert set(checks(doctor(model))) == {"replicated"}
    assert "7 of 34 parameters are 4-bit, whole on each of" in str(doctor(model))
    for block in model.blocks:
        fully_shard(block)
    unsynchronized, replicated = doctor(model).findings
    assert (replicated.severity, replicated.check) == ("warning", "replicated")
    assert replicated.names == ("head.base.weight",)
    whole = model.head.base.weight.nbytes
    assert replicated.nbytes == whole - whole // world_size
    assert (unsynchronized.severity, unsynchronized.check) == ("error", "unsynchronized")
    assert unsynchronized.names == ("head.lora_a.weight", "head.lora_b.weight")
    assert replicated.fix == unsynchronized.fix
    apply_fix(replicated, model)
    assert not doctor(model).findings

    for finding in doctor(DistributedDataParallel(lora_model(), init_sync=False)).findings:
        assert (finding.severity, finding.check) == ("note", "replicated")

    large = lora_model()
    large.embed = nn.Embedding(4096, WIDTH).requires_grad_(False)
    fully_shard(large, ignored_params={large.embed.weight})
    (replicated, _) = doctor(large).findings
    assert (replicated.check, replicated.names) == ("replicated", ("embed.weight",))


@two_or_more
def test_what_is_not_sharded_is_named(ranks: Ranks):
    ranks.run(partly_sharded)


def settings(rank, world_size):
    model = lora_model()
    fully_shard(model.blocks[0], reshard_after_forward=2)
    fully_shard(model)
    (finding,) = doctor(model).findings
    assert (finding.severity, finding.check) == ("error", "integer-reshard")
    assert finding.names == ("blocks.0",)
    apply_fix(finding, model)
    assert not doctor(model).findings
    backward(model)

    policy = MixedPrecisionPolicy(param_dtype=torch.float64)
    (finding,) = doctor(fully_shard(lora_model(), mp_policy=policy)).findings
    assert (finding.severity, finding.check) == ("error", "gathered-dtype")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert not doctor(fully_shard(lora_model(), mp_policy=policy)).findings


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_settings_that_cannot_work_are_named(ranks: Ranks):
    ranks.run(settings)


def dtypes_and_ties(rank, world_size):
    model = lora_model()
    model.blocks[0].up.lora_a.to(torch.bfloat16)
    shard(model)
    (finding,) = doctor(model).findings
    assert (finding.severity, finding.check) == ("error", "mixed-trainable")
    assert finding.names == ("blocks.0.up.lora_a.weight",)
    with pytest.raises(AssertionError, match="uniform original parameter dtype"):
        backward(model)
    model = lora_model()
    model.blocks[0].up.lora_a.to(torch.bfloat16)
    apply_fix(finding, model)
    shard(model)
    assert not doctor(model).findings
    backward(model)

    for is_whole in (False, True):
        model = lora_model(hidden=(64, 64))
        model.blocks[1].up.base.weight = model.blocks[0].up.base.weight
        if is_whole:
            fully_shard(list(model.blocks))
            fully_shard(model)
            assert not doctor(model).findings
            continue
        shard(model)
        (finding,) = doctor(model).findings
        assert finding.check == "broken-tie"
        assert finding.names == ("blocks.1.up.base.weight",)
        assert finding.nbytes == model.blocks[1].up.base.weight.to_local().nbytes


@two_or_more
def test_dtypes_and_ties_of_sharded_models(ranks: Ranks):
    ranks.run(dtypes_and_ties)


def faults_of_shards(rank, world_size):
    """Faults that a single process shows too, and that must not hide in DTensors."""
    model = shard(lora_model())
    early = [nn.Parameter(p.full_tensor().detach()) for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(early)
    model.blocks[0].up.base.weight.requires_grad_()
    model.blocks[0].norm.requires_grad_()
    model.blocks[1].up.base.register_buffer("copy", torch.ones(130, WIDTH))
    model.blocks[2].up.base.copy = model.blocks[2].up.base.weight.to_local().dequantize()
    found = checks(doctor(model, optimizer=optimizer))
    assert found["trainable-base"] == (UP,)
    assert found["trainable-dense"] == ("blocks.0.norm.weight", "blocks.0.norm.bias")
    assert found["dense-copy"] == ("blocks.1.up.base.copy", "blocks.2.up.base.copy")
    assert len(found["optimizer-missing"]) == 2 + len(early)
    assert len(found["optimizer-stale"]) == len(early)
    model.blocks[0].up.base.weight.requires_grad_(False)
    report = doctor(model, optimizer=optimizer)
    for check in ("trainable-dense", "dense-copy", "optimizer-missing"):
        (finding,) = (f for f in report.findings if f.check == check)
        optimizer = apply_fix(finding, model).get("optimizer", optimizer)
    assert not doctor(model, optimizer=optimizer).findings

    ignored = lora_model()
    frozen = [p for p in ignored.parameters() if isinstance(p, NF4Tensor)]
    wrapped = FullyShardedDataParallel(
        ignored, ignored_states=frozen, device_id=torch.device("cpu"), use_orig_params=True
    )
    assert {"fsdp1", "replicated"} <= set(checks(doctor(wrapped)))
    (finding,) = (f for f in doctor(wrapped).findings if f.check == "fsdp1")
    assert (finding.names, finding.nbytes) == (("",), sum(p.nbytes for p in frozen))
    apply_fix(finding, bare := lora_model())
    assert not doctor(bare).findings


@two_or_more
def test_faults_of_sharded_models(ranks: Ranks):
    ranks.run(faults_of_shards)


def more_parameters(model, odd):
    if odd:
        model.blocks[0].up.extra_lora = nn.Linear(4, 4)
    shard(model)
    return "names", ("blocks.0.up.extra_lora.weight", "blocks.0.up.extra_lora.bias")


def another_spec(model, odd):
    if odd:
        dense = model.blocks[0].up.base.weight.dequantize()
        model.blocks[0].up.base.weight = nn.Parameter(to_nf4(dense, 32), requires_grad=False)
    shard(model)
    return "spec", (UP,)


def another_shape(model, odd):
    if odd:
        dense = torch.randn(61, WIDTH)
        model.blocks[0].up.base.weight = nn.Parameter(to_nf4(dense), requires_grad=False)
    return "shape", (UP,)


def dense_on_one_rank(model, odd):
    if odd:
        dense = model.blocks[0].up.base.weight.dequantize()
        model.blocks[0].up.base.weight = nn.Parameter(dense, requires_grad=False)
    shard(model)
    return "class", (UP,)


def another_dtype(model, odd):
    model.blocks[0].up.lora_a.to(torch.bfloat16 if odd else torch.float32)
    return "dtype", ("blocks.0.up.lora_a.weight",)


def frozen_on_one_rank(model, odd):
    shard(model)
    model.head.lora_a.requires_grad_(not odd)
    return "requires_grad", ("head.lora_a.weight",)


def other_options(model, odd):
    shard(model, reshard_after_forward=bool(odd))
    return "options of fully_shard", ("", "blocks.0", "blocks.1", "blocks.2")


def other_bytes(model, odd):
    if odd:
        model.blocks[0].up.base.weight.record[5, 7] ^= 1
        model.blocks[1].norm.bias.data[3] = 1
    return "bytes", (UP, "blocks.1.norm.bias")


DISAGREEMENTS = (
    more_parameters,
    another_spec,
    another_shape,
    dense_on_one_rank,
    another_dtype,
    frozen_on_one_rank,
    other_options,
    other_bytes,
)


def disagree(rank, world_size):
    found = []
    for break_ in DISAGREEMENTS:
        model = lora_model()
        what, names = break_(model, rank == world_size - 1)
        report = doctor(model, check_ranks=True)
        (finding,) = (f for f in report.findings if f.check == "ranks-disagree")
        assert finding.severity == "error"
        assert finding.names == names
        assert finding.message.startswith(f"ranks disagree about {what}: {names[0] or 'the model'}")
        assert f" on rank {world_size - 1}" in finding.message
        assert "ranks-disagree" not in checks(doctor(model))
        found.append(finding)
    apply_fix(finding, model)
    assert "ranks-disagree" not in checks(doctor(model, check_ranks=True))
    model = shard(lora_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 if rank else 0.2)
    (finding,) = (
        f
        for f in doctor(model, optimizer=optimizer, check_ranks=True).findings
        if f.check == "ranks-disagree"
    )
    assert finding.names == ("the optimizer",)
    return [*map(str, found), str(finding)]


@two_or_more
def test_ranks_that_disagree_are_told_the_same(ranks: Ranks):
    first, *others = ranks.run(disagree)
    assert all(other == first for other in others)


def unreadable(rank, world_size):
    with pytest.raises(ShardingError) as failure:
        doctor(lora_model() if rank == 0 else nn.Linear, check_ranks=True)
    return str(failure.value)


@two_or_more
def test_a_rank_that_fails_ends_the_others(ranks: Ranks):
    first, *others = ranks.run(unreadable)
    assert "rank 1: TypeError: " in first
    assert "rank 0" not in first
    assert all(other == first for other in others)
