"""Which checkpoints stay: the newest few, and every n-th step for good."""

from orbax.checkpoint import v1 as ocp

from lmjax.train.config import CheckpointConfig


def policy(config: CheckpointConfig) -> ocp.training.preservation_policies.PreservationPolicy:
    """Orbax's policy: a checkpoint stays if any of the rules keeps it."""
    policies = ocp.training.preservation_policies
    kept = [policies.LatestN(config.keep)]
    if config.keep_every is not None:
        kept.append(policies.EveryNSteps(config.keep_every))
    return policies.AnyPreservationPolicy(kept)
