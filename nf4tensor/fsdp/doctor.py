"""`doctor`: what a user asks when memory is not saved or training is off.

Runs every check on a survey of the model and puts the findings together. Called by users.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from nf4tensor.fsdp import copy_checks, sharding_checks, training_checks, weight_checks
from nf4tensor.fsdp.rank_checks import disagreements
from nf4tensor.fsdp.report import Finding, Report, collect
from nf4tensor.fsdp.survey import Survey, survey, world_size

CHECKS: tuple[Callable[[Survey], Iterator[Finding]], ...] = (
    weight_checks.nothing_quantized,
    weight_checks.quantized_by_others,
    weight_checks.trainable_base,
    weight_checks.upcasts,
    weight_checks.logical_dtypes,
    weight_checks.dense_weights,
    copy_checks.dense_copies,
    copy_checks.hidden_storage,
    copy_checks.broken_ties,
    training_checks.trainable_dense,
    training_checks.frozen_gradients,
    training_checks.optimizer_of_frozen,
    training_checks.optimizer_without_trainable,
    training_checks.optimizer_of_strangers,
    sharding_checks.replicated,
    sharding_checks.unsynchronized,
    sharding_checks.integer_reshard,
    sharding_checks.gathered_dtype,
    sharding_checks.mixed_trainable,
    sharding_checks.wrapped_by_fsdp1,
)


def doctor(model: nn.Module, *, optimizer: Any = None, check_ranks: bool = False) -> Report:
    """Examine a model: is its base 4-bit, frozen and sharded, and does the rest fit to it?

    Nothing is changed. `print` the report; in a test, `doctor(model).assert_healthy()`.

    Args:
        model: Any module: sharded or not, on any device, on the meta device too.
        optimizer: Anything with the `param_groups` and `state` of `torch.optim.Optimizer`; without
            it, what it holds goes unchecked.
        check_ranks: Compare the ranks of the default process group too: names, shapes, specs,
            dtypes, options, padded geometry, and the bytes of what every rank has whole. Every rank
            must call this then, with any model: it cannot hang.

    Returns:
        The report of this rank. What ranks disagree about is the same finding on each.

    Raises:
        ShardingError: With `check_ranks`, a rank could not read its model. The same on every rank.
    """
    among_ranks: list[Finding] = []
    if check_ranks:
        found, among_ranks = disagreements(lambda: survey(model, optimizer))
    else:
        found = survey(model, optimizer)
    return Report(
        num_parameters=len(found.entries),
        num_quantized=len(found.quantized),
        num_shards=tuple(sorted({entry.num_shards for entry in found.quantized})),
        world_size=world_size(),
        bytes_by_role=found.bytes_by_role(),
        findings=collect(
            [*among_ranks, *(finding for check in CHECKS for finding in check(found))]
        ),
    )
