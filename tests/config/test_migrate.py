"""Settings of earlier versions: every old name is migrated in a run's config.yaml, and explained to a user."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from corral.algos.base import Algorithm
from corral.algos.registry import ALGORITHMS
from corral.config import migrate as module
from corral.config.experiment import Experiment
from corral.config.migrate import explain_old_name, migrate, read_config, rename_envs
from corral.config.overrides import leaves, read
from corral.core.errors import UserError
from corral.nets.config import NetConfig

OLD_RUNS = Path(__file__).parents[1] / "golden" / "old_runs"

# Old name -> algorithm that has it, and its new name; MOVES 3.2 is the list.
RENAMED = {
    "lr": ("ppo", "learning_rate"), "lam": ("ppo", "gae_lambda"), "length": ("ppo", "num_steps"),
    "epochs": ("ppo", "update_epochs"), "minibatches": ("ppo", "num_minibatches"), "clip": ("ppo", "clip_coef"),
    "anneal_clip": ("ppo", "clip_coef=0.2:0"), "clip_value": ("ppo", "clip_range_vf"), "entropy": ("ppo", "ent_coef"),
    "value_coef": ("ppo", "vf_coef"), "normalize_return": ("reinforce", "normalize_advantage"),
    "algorithm.episodes": ("reinforce", "episodes_per_update"), "capacity": ("dqn", "buffer_size"),
    "replay_capacity": ("impala", "buffer_size"), "train_every": ("dqn", "train_frequency"),
    "updates": ("dqn", "gradient_steps"), "target_every": ("dqn", "target_update_period"),
    "double": ("dqn", "double_q"),
    "prioritised": ("dqn", "prioritized_replay"), "ladder": ("apex", "epsilon_ladder"),
    "epsilon_start": ("dqn", "exploration_initial_eps"), "epsilon_end": ("dqn", "exploration_final_eps"),
    "epsilon_fraction": ("dqn", "exploration_fraction"), "correction": ("impala", "vtrace"),
    "rho_bar": ("impala", "vtrace_rho"), "c_bar": ("appo", "vtrace_c"), "replayed": ("impala", "replay_fraction"),
    "max_lag": ("appo", "max_policy_lag"), "sims": ("alphazero", "num_simulations"),
    "fast_sims": ("alphazero", "fast_simulations"), "full_share": ("alphazero", "full_search_fraction"),
    "share": ("ppo-search", "search_fraction"), "beta": ("ppo-search", "search_acts_fraction"),
    "distill": ("ppo-search", "distill_coef"), "kappa": ("ppo-search", "search_value_fraction"),
    "gate": ("ppo-search", "min_explained_variance"), "epsilon": ("ppo-search", "random_action_fraction"),
    "noise": ("alphazero", "root_noise"), "past_share": ("alphazero", "past_self_fraction"),
    "scripted": ("alphazero", "opponents"), "scripted_share": ("alphazero", "opponent_fraction"),
    "replays": ("alphazero", "replay_ratio"), "anneal_lr": ("alphazero", "final_lr_fraction"),
    "root": ("alphazero", "root_selection"), "leaves": ("alphazero", "leaves_in_flight"),
    "samples": ("ppo-search", "num_sampled_actions"), "considered": ("alphazero", "max_num_considered_actions"),
    "widening": ("ppo-search", "progressive_widening"), "grain": ("alphazero", "value_resolution"),
    "dirichlet_frac": ("alphazero", "dirichlet_fraction"), "reuse": ("alphazero", "reuse_tree"),
    "net.torso": ("ppo", "encoder"), "hidden": ("ppo", "hidden_sizes"), "core": ("ppo", "rnn"),
    "core_size": ("ppo", "rnn_size"), "log_std": ("ppo", "log_std_init"), "threads": ("ppo", "torch_threads"),
    "scale.learners": ("impala", "actor_learner.learners"), "replay": ("ppo", "save_replay_buffer"),
    "scale.replay_shards": ("apex", "actor_learner.replay_shards"), "weights": ("impala", "weight_sync"),
    "scale.min_actors": ("impala", "actor_learner.min_actors"), "pull_lag": ("impala", "weight_sync=lag:K"),
    "scale.max_restarts": ("impala", "actor_learner.max_restarts"), "envs_per_actor": ("impala", "num_envs"),
    "sharing.exchange": ("dppo", "data_parallel.exchange"), "sharing.compress": ("dppo", "data_parallel.compress"),
    "sharing.servers": ("dppo", "data_parallel.servers"), "sharing.mode": ("dppo", "data_parallel.mode"),
    "sharing.quantize_weights": ("gala", "data_parallel.quantize_weights"), "lag": ("dppo", "mode=ssp:K"),
    "drop": ("dppo", "backup_workers"), "graph": ("gala", "gossip_graph"), "momentum": ("dppo", "compress_momentum"),
    "evaluation.every_steps": ("ppo", "eval_every"), "evaluation.episodes": ("ppo", "eval_episodes"),
    "evaluation.env_kwargs": ("ppo", "eval_env_kwargs"), "checkpoints.every_s": ("ppo", "checkpoint_every_s"),
    "checkpoints.every_steps": ("ppo", "checkpoint_every"), "checkpoints.keep": ("ppo", "keep_checkpoints"),
    "checkpoints.replay": ("ppo", "save_replay_buffer"), "log.every_s": ("ppo", "log_every_s"),
    "log.every_steps": ("ppo", "log_every"), "evaluation": ("ppo", "eval_episodes"), "scale": ("ppo", "actor_learner"),
    "past_kept": ("alphazero", "removed"), "past_every": ("alphazero", "removed"),
    "steps_per_turn": ("alphazero", "removed"), "weight_decay": ("alphazero", "removed"),
    "in_flight_mb": ("impala", "removed"), "error_feedback": ("dppo", "removed"), "listen": ("ppo", "corral serve ENV"),
}  # fmt: skip


@pytest.mark.parametrize("old", RENAMED)
def test_old_name_is_an_error_with_the_new_one(old):
    algo, new = RENAMED[old]
    with pytest.raises(UserError) as caught:
        Experiment.make(algo, "CartPole-v1", overrides={old: 1})
    assert f"No setting '{old}'" in str(caught.value)
    assert new in str(caught.value)


def test_rho_bar_of_ppo_search_has_another_name():
    with pytest.raises(UserError, match="it is called max_importance_weight now"):
        Experiment.make("ppo-search", "CartPole-v1", overrides={"rho_bar": 2})


def test_mode_of_ppo_search_is_explained():
    with pytest.raises(UserError, match="mode of ppo-search is search_mode"):
        Experiment.make("ppo-search", "CartPole-v1", overrides={"mode": "expert"})


def test_list_of_old_names_is_complete():
    tables = [module.ALGORITHM_2, *module._INNER_2.values(), module._MERGED_2, module._DROPPED_2]
    old = {name for table in tables for name in table} | set(module._EXPERIMENT_2)
    short = {name.rpartition(".")[2] for name in RENAMED}
    assert not {name for name in old if name not in RENAMED and name.rpartition(".")[2] not in short}


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_no_present_name_is_an_old_one(algo):
    names = leaves(Experiment.make(algo, "CartPole-v1", preset="none"))
    assert not [name for name in names if name in module._EXPERIMENT_2]


def test_unknown_names_are_not_explained():
    assert explain_old_name("nonsense", ["algorithm.learning_rate"]) is None
    assert explain_old_name("lr", ["something.else"]) is None


ADDED = {"eval_background", "worker_cpus", "eval_max_fraction", "init", "supervision"}
"""Settings that are younger than the old runs."""


@pytest.mark.parametrize("name", sorted(path.parent.name for path in OLD_RUNS.glob("*/config.yaml")))
def test_old_run_keeps_every_value(name):
    path = OLD_RUNS / name / "config.yaml"
    found = read_config(path)
    experiment = Experiment.from_dict(found.settings)
    assert experiment.to_dict().keys() - found.settings.keys() == ADDED
    assert found.settings.keys() <= experiment.to_dict().keys()
    assert found.notes == ()
    old, new = yaml.safe_load(path.read_text()), experiment.to_dict()
    assert new["torch_threads"] == old["threads"]
    assert new["eval_episodes"] == old["evaluation"]["episodes"]
    assert new["log_every"] == old["log"]["every_steps"]
    inner = old["algorithm"].get("ppo", old["algorithm"]), new["algorithm"].get("ppo", new["algorithm"])
    assert inner[1]["learning_rate"] == inner[0]["lr"]
    assert inner[1]["net"]["hidden_sizes"] == inner[0]["net"]["hidden"]


def old_config(name, **changes):
    config = yaml.safe_load((OLD_RUNS / name / "config.yaml").read_text())
    for key, value in changes.items():
        group, _, last = key.rpartition("__")
        (config[group] if group else config)[last] = value
    return config


@pytest.mark.parametrize(
    ("name", "changes", "full", "expected"),
    [
        ("dppo", {"algorithm__anneal_clip": True}, "algorithm.clip_coef", "0.2:0"),
        ("dppo", {"algorithm__clip": 0.1}, "algorithm.clip_coef", 0.1),
        (
            "dppo",
            {"sharing__exchange": "gossip", "sharing__mode": "lag", "sharing__lag": 4},
            "data_parallel.mode",
            "ssp:4",
        ),
        ("ppo_ssp", {"sharing__mode": "async"}, "data_parallel.mode", "async"),
        ("impala_actors", {"scale__weights": "lag", "scale__pull_lag": 2}, "actor_learner.weight_sync", "lag:2"),
        ("impala_actors", {"scale__envs_per_actor": 6, "actors": 2}, "num_envs", 12),
        ("impala_actors", {"algorithm__correction": "none"}, "algorithm.vtrace", False),
        ("alphazero_tictactoe", {"algorithm__anneal_lr": False}, "algorithm.final_lr_fraction", 1.0),
        ("alphazero_tictactoe", {"algorithm__anneal_lr": True}, "algorithm.final_lr_fraction", 0.1),
        ("alphazero_tictactoe", {"algorithm__sims": "8->64"}, "algorithm.num_simulations", "8:64"),
        ("alphazero_tictactoe", {"algorithm__noise": "1 -> 0.1@0.3"}, "algorithm.root_noise", "1 : 0.1@0.3"),
        ("ppo_search", {"algorithm__rho_bar": 3.0}, "algorithm.max_importance_weight", 3.0),
        ("ppo_search", {"algorithm__mode": "expert"}, "algorithm.search_mode", "expert"),
    ],
)
def test_merged_settings_are_migrated(name, changes, full, expected):
    value = Experiment.from_dict(migrate(old_config(name, **changes), "config.yaml").settings)
    for part in full.split("."):
        value = getattr(value, part)
    assert value == expected


def test_settings_that_are_lost_are_noted():
    changes = {"algorithm__past_kept": 3, "algorithm__weight_decay": 0.0, "scale__in_flight_mb": 64.0}
    found = migrate(old_config("alphazero_tictactoe", **changes), "config.yaml")
    assert sorted(note.partition(" ")[0] for note in found.notes) == [
        "in_flight_mb=64.0", "past_kept=3", "weight_decay=0.0",
    ]  # fmt: skip
    Experiment.from_dict(found.settings)


class Own(Algorithm):
    """An algorithm outside of Corral, with its Config beside it."""


@dataclass(frozen=True)
class Config:
    lr: float = 0.1
    buffer_size: int = 1
    net: NetConfig = field(default_factory=NetConfig)


def test_edited_old_config_is_one_sentence():
    settings = migrate(old_config("dppo", scale__speed=3, log=None, algorithm=None), "config.yaml").settings
    with pytest.raises(UserError, match=r"No setting 'scale.speed'"):
        Experiment.from_dict(settings)


def test_format_1_without_its_groups_is_migrated():
    config = {"format": 1, "algo": "ppo", "algorithm": {"lr": 1e-3}}
    assert migrate(config, "x").settings == {"algo": "ppo", "algorithm": {"learning_rate": 1e-3}}


@pytest.mark.parametrize(
    "bad", [{"scale": 3}, {"log": "x"}, {"algorithm": 3}, {"algo": "ppo", "algorithm": {"net": 3}}]
)
def test_format_1_with_a_number_for_a_group_is_one_sentence(bad):
    with pytest.raises(UserError, match=r"^x is not a config of format 1, as it claims: .*\.$"):
        migrate({"format": 1} | bad, "x")


def test_environments_on_other_machines_are_noted():
    found = migrate(old_config("dppo", backend="grpc", listen="10.0.0.1:5555"), "config.yaml")
    assert (found.settings["backend"], "listen" in found.settings) == ("auto", False)
    assert "corral serve CartPole-v1 --connect grpc://10.0.0.1:5555" in found.notes[0]


def test_removed_backend_grpc_says_what_to_do():
    with pytest.raises(UserError, match=r"got 'grpc'\. It was removed: train with --env grpc://HOST:PORT"):
        Experiment.make("ppo", "CartPole-v1", overrides={"backend": "grpc"})


def test_own_algorithm_keeps_its_names_and_gets_corrals():
    old = old_config("dppo", algo=f"{__name__}:Own")
    old["algorithm"] = {"lr": 1.0, "capacity": 5, "net": {"hidden": [3], "core": "none"}}
    found = migrate(old, "config.yaml").settings["algorithm"]
    assert found == {"lr": 1.0, "buffer_size": 5, "net": {"hidden_sizes": [3], "rnn": "none"}}
    old["algo"] = "no_such_module:Own"
    assert migrate(old, "config.yaml").settings["algorithm"] == old["algorithm"]


def test_environments_in_checkpoints_are_renamed():
    old, new = "corral.testing.hybrid:MoveOrShoot", "corral.testing.tasks:MoveOrShoot"
    state = {"vec": {"identity": {"env": old}}, "parts": [{"identity": {"env": old}}, {"identity": {"env": "x"}}]}
    rename_envs(state)
    assert state == {
        "vec": {"identity": {"env": new}},
        "parts": [{"identity": {"env": new}}, {"identity": {"env": "x"}}],
    }


@pytest.mark.parametrize(
    ("elsewhere", "algo", "here"),
    [
        ("clip_range", "ppo", "it is called clip_coef here."),
        ("n_steps", "ppo", "it is called num_steps here."),
        ("batch_size", "ppo", "set num_minibatches."),
        ("policy_kwargs", "ppo", "net.hidden_sizes"),
        ("capacity", "ppo", "'capacity'; other algorithms have it, as buffer_size."),
        ("max_lag", "ppo", "'max_lag'; other algorithms have it, as max_policy_lag."),
        ("zzzz", "ppo", "'zzzz'; `corral train ALGO --help` lists all"),
        ("n_epochs", "ppo", "it is called update_epochs here."),
        ("train_freq", "dqn", "it is called train_frequency here."),
        ("net_arch", "ppo", "it is called hidden_sizes here."),
        ("total_timesteps", "ppo", "it is called steps here."),
        ("target_update_interval", "dqn", "target_update_period here, and counts updates, not environment steps."),
    ],
)
def test_names_of_other_libraries_are_explained(elsewhere, algo, here):
    with pytest.raises(UserError) as caught:
        read(Experiment.make(algo, "CartPole-v1"), {elsewhere: 1})
    assert here in str(caught.value)


def test_runs_of_format_3_keep_their_encoding_and_threads():
    net = {"encoder": "auto", "rnn": "none", "normalize_obs": False}
    run = {"format": 3, "algo": "ppo-search", "topology": "sync", "torch_threads": None}
    config = run | {"algorithm": {"gamma": 0.9, "ppo": {"net": net}, "net": net}}
    found = migrate(config, "config.yaml").settings
    old = net | {"obs_encoding": "bytes"}
    assert found["algorithm"] == {"gamma": 0.9, "ppo": {"net": old}, "net": old}
    assert found["torch_threads"] == "all"
    kept = migrate(config | {"torch_threads": 3}, "config.yaml").settings
    others = migrate(config | {"topology": "actor_learner"}, "config.yaml").settings
    assert (kept["torch_threads"], others["torch_threads"]) == (3, None)
    new = {"format": 4, "algorithm": {"net": net}}
    assert migrate(new, "config.yaml").settings == {"algorithm": {"net": net}}


@pytest.mark.parametrize("algo", ["dqn", "apex"])
def test_dueling_of_format_2_is_the_shared_head(algo):
    config = {"format": 2, "algo": algo, "algorithm": {"dueling": True, "n_step": 3}}
    assert migrate(config, "config.yaml").settings["algorithm"] == {"dueling": "shared", "n_step": 3}
    assert migrate(config | {"format": 3}, "config.yaml").settings["algorithm"]["dueling"] is True
