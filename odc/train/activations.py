"""What a run says of its activations."""

from typing import Any

from odc.memory.activations import MODES, ActivationAccount, predict_peak


def activation_facts(account: ActivationAccount) -> dict[str, Any]:
    """Returns the account as `summary.json` has it; sizes in bytes.

    `layers` is what the calls of each layer saved without what they were given, which is in
    `boundary_bytes` together; `predicted_peak_bytes` is what the measured pass would have kept in
    each mode, and in the run's own mode with `activations.loss_chunk`.
    """
    facts: dict[str, Any] = {"mode": account.mode, "peak_bytes": account.max_peak_bytes}
    profile = account.profile
    if profile is None:
        return facts
    predicted = {mode: predict_peak(profile, mode) for mode in MODES}
    predicted["loss_chunk"] = predict_peak(profile, account.mode, chunked_loss=True)
    return facts | {
        "tokens": profile.tokens,
        "layers": profile.by_layer(),
        "boundary_bytes": profile.boundary_bytes,
        "outside_bytes": profile.outside_bytes,
        "logits_bytes": profile.loss_bytes,
        "predicted_peak_bytes": predicted,
    }
