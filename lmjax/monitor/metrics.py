"""Names of what is measured, their units and meaning: one table, so that rows, progress line and plots agree.

A row of `metrics.jsonl` holds `step` (optimizer steps done) and any of these. Evaluation of one source puts the source's name
in between: `eval/<source>/loss` means what `eval/loss` does.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Metric:
    """A kind of number."""

    unit: str  # "" for pure numbers
    meaning: str


METRICS = {
    "tokens": Metric("tokens", "positions trained on since step 0, padding included"),
    "train/loss": Metric(
        "nats", "cross-entropy of a trained token, mean over the step's batch; auxiliary losses apart"
    ),
    "train/z_loss": Metric("nats", "mean of log² Z times its coefficient, beside the loss"),
    "train/balance_loss": Metric("nats", "of routers: E Σ f P of a row, summed over layers, times its coefficient"),
    "train/router_z_loss": Metric("nats", "mean of log² Z of routers, summed over layers, times its coefficient"),
    "moe/load_max": Metric("", "choices of the fullest expert over the mean of its layer, in the worst layer"),
    "moe/load_min": Metric("", "choices of the emptiest expert over the mean of its layer, in the worst layer"),
    "moe/dropped_share": Metric("", "of all choices, those that found their expert full"),
    "moe/router_entropy": Metric("nats", "of a token's probabilities over experts, mean over tokens and layers"),
    "train/grad_norm": Metric("", "global norm of the gradient before clipping"),
    "train/learning_rate": Metric("", "of the step, at the schedule's place"),
    "train/loss_scale": Metric("", "what float16 multiplies the loss by before the backward pass; else 1"),
    "train/target_tokens": Metric("tokens", "sum of the step's loss weights: what the loss is a mean over"),
    "train/skipped": Metric("", "1 where loss or gradient was not finite and the step changed no parameter, else 0"),
    "speed/tokens_per_s": Metric("tokens/s", "all devices together, since the last row"),
    "speed/step_s": Metric("s", "a step's wall time, mean since the last row; evaluations and pauses apart"),
    "speed/data_wait_s": Metric("s", "of a step's wall time, waiting for its batch"),
    "speed/mfu": Metric("", "model FLOPs a second over the devices' peak"),
    "eval/loss": Metric("nats", "cross-entropy of a held-out token, without auxiliary losses"),
    "eval/perplexity": Metric("", "exp of the loss; depends on the tokenizer"),
    "eval/bits_per_byte": Metric("bits", "of a byte of the held-out text; does not depend on the tokenizer"),
}


def find(name: str) -> Metric | None:
    """The table's entry for a name, `eval/<source>/…` included; none for a name that only a run's own code knows."""
    section, _, rest = name.partition("/")
    if name not in METRICS and section == "eval" and "/" in rest:
        name = f"eval/{rest.rsplit('/', 1)[1]}"
    return METRICS.get(name)
