"""The config of a run in files: its sections, and configs that version 0.2 wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpcore.options.keys import put

SECTIONS = ("model", "data", "optimizer", "strategy", "run")
# Keys of a config that change no result: they may change when a run is resumed, and do not tell two runs apart.
BOOKKEEPING = (
    *("data.data_dir", "data.download", "strategy.timeout", "strategy.learners_at_once"),
    *("run.checkpoint_every", "run.keep_last", "run.keep_best"),
    *("run.save_nonfinite", "run.record_steps"),
)
_NAMES_0_2 = {
    "model": "model", "dataset": "data", "optimizer": "optimizer", "schedule": "optimizer.schedule",
    "strategy": "strategy", "topology": "strategy.topology", "shards": "data.shards",
}  # fmt: skip
_FIELDS_0_2 = {
    "model": "channels_last precision compile",
    "data": "data_dir download normalize augment num_validation num_train num_test random_labels sampler drop_last "
    "batch_size batch_growth batch_growth_lr accumulation",
    "optimizer": "param_groups lr reference_batch_size schedule_unit milestones gamma warmup warmup_start "
    "label_smoothing max_grad_norm",
    "strategy": "policies learners transport link on_failure timeout on_nonfinite",
    "run": "epochs steps device target evaluate_every evaluate_on evaluation_batch_norm recalibration_batches "
    "statistics_every statistics_samples hessian_every hessian_samples hessian_top flatness_samples escape_loss "
    "record_steps seed diverged_above checkpoint_every keep_last keep_best save_nonfinite",
}
# The key of each field of version 0.2, in which a config was one flat table.
KEYS_0_2: Mapping[str, str] = {
    **{f"{name}_options": key for name, key in _NAMES_0_2.items()},
    **_NAMES_0_2,
    **{name: f"{section}.{name}" for section, names in _FIELDS_0_2.items() for name in names.split()},
}


def key_of_0_2(key: str) -> str | None:
    """The key that replaces one of version 0.2, such as ``optimizer.momentum`` for ``optimizer_options.momentum``."""
    name, dot, option = key.partition(".")
    return KEYS_0_2[name] + dot + option if name in KEYS_0_2 and key not in SECTIONS else None


def from_0_2(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a flat config of version 0.2; a section is left out if nothing of it is there.

    Fields that version 0.2 did not have stay as they are, so that :class:`ddpcore.training.TrainConfig` refuses them.
    """
    found: dict[str, Any] = {}
    for name in (*_NAMES_0_2, *config):  # names first: an option goes to the part that has it
        if name in config:
            value, key = config[name], KEYS_0_2.get(name, name)
            if name.endswith("_options") and isinstance(value, Mapping):
                for option, of_option in value.items():
                    put(found, f"{key}.{option}", of_option)
            elif name in _NAMES_0_2 or name in KEYS_0_2:
                put(found, f"{key}.name" if name in _NAMES_0_2 else key, value)
            else:
                found[name] = value
    strategy = found.get("strategy")
    if isinstance(strategy, dict) and isinstance(policies := strategy.get("policies"), Mapping):
        # "keep" was the default of the policy that is gone.
        strategy["policies"] = {key: value for key, value in policies.items() if (key, value) != ("scaler", "keep")}
    return found


def nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config of a file in sections; one of version 0.2 is converted, see :func:`from_0_2`."""
    is_nested = all(isinstance(value, Mapping) for value in config.values()) and set(config) <= set(SECTIONS)
    return dict(config) if is_nested else from_0_2(config)
