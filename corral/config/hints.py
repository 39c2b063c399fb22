"""What to write instead of a name that is no setting: names of other libraries, earlier ones, and misspelt ones."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

from corral.config.migrate import ALGORITHM_2, explain_old_name, successors

_ELSEWHERE = {
    # Stable-Baselines3 and CleanRL
    "n_envs": "num_envs", "n_steps": "num_steps", "rollout_length": "num_steps", "n_epochs": "update_epochs",
    "clip_range": "clip_coef", "entropy_coef": "ent_coef", "value_coef": "vf_coef", "value_loss_coef": "vf_coef",
    "total_timesteps": "steps", "timesteps": "steps", "total_steps": "steps", "max_steps": "steps",
    "replay_buffer_size": "buffer_size", "train_freq": "train_frequency", "minibatch_size": "batch_size",
    "target_network_frequency": "target_update_period", "target_update_interval": "target_update_period",
    "start_e": "exploration_initial_eps", "end_e": "exploration_final_eps", "net_arch": "hidden_sizes",
    "activation_fn": "activation", "env_id": "env", "random_seed": "seed", "discount": "gamma",
    "discount_factor": "gamma", "eval_freq": "eval_every", "n_eval_episodes": "eval_episodes",
    "save_freq": "checkpoint_every",
    # RLlib
    "entropy_coeff": "ent_coef", "vf_loss_coeff": "vf_coef", "grad_clip": "max_grad_norm", "clip_param": "clip_coef",
    "vf_clip_param": "clip_range_vf", "kl_target": "target_kl", "lambda": "gae_lambda", "lambda_": "gae_lambda",
    "num_sgd_iter": "update_epochs", "num_epochs": "update_epochs", "rollout_fragment_length": "num_steps",
    "train_batch_size": "batch_size", "train_batch_size_per_learner": "batch_size", "num_learners": "learners",
    "target_network_update_freq": "target_update_period", "num_steps_sampled_before_learning_starts": "learning_starts",
    "fcnet_hiddens": "hidden_sizes", "fcnet_activation": "activation", "lstm_cell_size": "rnn_size",
    "env_config": "env_kwargs", "evaluation_interval": "eval_every", "evaluation_duration": "eval_episodes",
    # arguments of `corral.train` that are not settings
    "tensorboard_log": "run_dir", "log_dir": "run_dir", "output_dir": "run_dir", "save_path": "run_dir",
    "callback": "callbacks", "sink": "sinks", "logger": "sinks", "verbose": "quiet", "load": "init",
}  # fmt: skip
"""Name in another library -> name here."""
_ARGUMENTS = ("run_dir", "callbacks", "sinks", "quiet")
"""Arguments of `corral.train` that are not settings."""
_OPTIONS = {"callbacks": "callback", "sinks": "sink"}
"""Argument -> its option on the command line, where that has another name."""
_MINIBATCHES = "a minibatch has num_envs * num_steps / num_minibatches steps: set num_minibatches."
_BATCH = "a batch has num_envs * num_steps steps: set num_envs or num_steps."
_PROCESSES = (
    "set workers, the number of processes that step the num_envs environments, or, with topology=actor_learner, actors."
)
_PER_PROCESS = "set num_envs, the number of environments of all processes together."
_DEVICE = "set device=cuda, or device=cpu for none; several learners are spread over the GPUs."
_NET = {"hidden_sizes": "the network is set by net.hidden_sizes, net.activation, net.rnn and so on."}
_OTHERWISE: dict[str, dict[str, str]] = {
    **{key: {"num_minibatches": _MINIBATCHES, "num_steps": _BATCH} for key in ("batch_size", "minibatch_size")},
    "sgd_minibatch_size": {"num_minibatches": _MINIBATCHES},
    **{key: {"num_steps": _BATCH} for key in ("train_batch_size", "train_batch_size_per_learner")},
    "policy_kwargs": _NET, "model": _NET,
    "use_lstm": {"rnn": "set rnn=lstm."}, "observation_filter": {"normalize_obs": "set normalize_obs=true."},
    **{key: {"workers": _PROCESSES} for key in ("num_workers", "num_env_runners", "num_rollout_workers")},
    **{key: {"num_envs": _PER_PROCESS} for key in ("num_envs_per_worker", "num_envs_per_env_runner")},
    **{key: {"device": _DEVICE} for key in ("num_gpus", "num_gpus_per_learner", "num_gpus_per_worker", "cuda", "gpu")},
}  # fmt: skip
"""Name there -> settings here that have another form -> how; the first that the algorithm has counts."""
_MAX_LISTED = 20  # settings in a message
_IN_UPDATES = ("target_network_frequency", "target_update_interval")  # elsewhere in environment steps


def explain_setting(key: str, names: Collection[str]) -> str:
    """What to write instead of an unknown setting, as the end of a sentence; `names` are the settings there are."""
    last = {name.rpartition(".")[2]: name for name in names}
    typed = key.rpartition(".")[2]
    same = _ELSEWHERE.get(typed)
    if same in _ARGUMENTS:
        return f"it is the argument {same} here."
    if (found := _otherwise(typed, last)) is not None:
        return found
    old = explain_old_name(key, names)
    if old is not None:
        return old
    if same in last:
        unit = ", and counts updates, not environment steps" if typed in _IN_UPDATES else ""
        return f"it is called {same} here{unit}."
    close = difflib.get_close_matches(typed, last, 3, 0.6) + difflib.get_close_matches(key, names, 2, 0.75)
    inside = [short for short in last if len(typed) > 3 and (typed in short or short in typed.split("_"))]
    either = list(dict.fromkeys(close + inside))
    if either:
        return f"did you mean {one_of(either)}?"
    if typed in ALGORITHM_2:
        return f"other algorithms have it, as {ALGORITHM_2[typed]}."
    if len(last) > _MAX_LISTED:
        return "`corral train ALGO --help` lists all, with their defaults."
    return f"the settings are {', '.join(last)}."


def explain_option(key: str, names: Collection[str], options: Collection[str]) -> str | None:
    """What to write instead of an unknown option, if it is known here, in earlier versions or in other libraries.

    Args:
        key: the option as the name of a setting.
        names: the settings there are.
        options: the options of the command, as names of settings.
    """
    last = {name.rpartition(".")[2] for name in names}
    same = _ELSEWHERE.get(key, key)
    option = _OPTIONS.get(same, same)
    if option in options:
        return f"did you mean --{option.replace('_', '-')}?"
    if (found := _otherwise(key, last)) is not None:
        return found
    new = [name for name in (same, *successors(key, names)) if name in last]
    return f"write --set {new[0]}=..." if new else None


def _otherwise(typed: str, last: Collection[str]) -> str | None:
    if typed in last or _ELSEWHERE.get(typed) in last:
        return None
    return next((how for needs, how in _OTHERWISE.get(typed, {}).items() if needs in last), None)


def one_of(names: Sequence[str]) -> str:
    """The names as a list in a sentence: `a, b or c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
