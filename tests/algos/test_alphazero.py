"""AlphaZero: who plays is on record, outcomes are of who moved, and the loss is the one that is stated."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.batches import loss_of
from pettingzoo import AECEnv

import corral
from corral.acting.policy import ActContext
from corral.acting.sampler import Sampler
from corral.algos.search.alphazero import AlphaZero, Config
from corral.core.errors import UserError
from corral.core.types import Positions
from corral.data.make import make_store
from corral.envs.suites.games.connect4 import CONNECT4
from corral.envs.suites.games.pettingzoo import AecEnv
from corral.envs.suites.games.tictactoe import TICTACTOE, best_moves
from corral.nets.config import NetConfig

SMALL = NetConfig(hidden_sizes=(32, 32), activation="relu")
ENV = "corral/TicTacToe-v0"


def played(steps=16, num_envs=8, env=ENV, progress=0.0, seed=0, **changes):
    """A trajectory of self-play, the policy, and the algorithm with its network."""
    config = Config(**({"num_simulations": 8, "net": SMALL} | changes))
    with corral.make_vec(env, num_envs, "local", seed=seed) as vec:
        algo = AlphaZero(config, vec.spec, num_envs)
        torch.manual_seed(seed)
        model = algo.build_model()
        policy = algo.make_policy(model, explore=True, rng=np.random.default_rng(seed))
        policy.set_context(ActContext(progress))
        with Sampler(vec, policy) as sampler:
            return next(sampler.rollouts(steps)), policy, algo, model


def test_every_move_is_legal_and_players_take_turns():
    traj, *_ = played(steps=40)
    legal = traj.obs[:-1].sum(2).reshape(*traj.shape, 9) == 0
    np.testing.assert_array_equal(traj.extras["legal"], legal)
    assert np.take_along_axis(legal, traj.action[..., None], 2).all()
    turn = traj.extras["to_play"]
    assert (turn[traj.first[:-1]] == 0).all()
    went_on = ~traj.first[1:-1]
    np.testing.assert_array_equal(turn[1:][went_on], 1 - turn[:-1][went_on])


def test_search_target_is_a_policy_over_legal_moves():
    traj, *_ = played(steps=24)
    better, legal = traj.extras["better"], traj.extras["legal"]
    assert traj.extras["searched"].all()
    np.testing.assert_allclose(better.sum(-1), 1.0, rtol=1e-5)
    assert not better[~legal].any()


def test_outcomes_in_the_store_are_those_of_the_games():
    """A position that somebody has won in the next move is worth 1 to who moves, and its successor -1 to the other."""
    traj, _, algo, _ = played(steps=60, num_envs=4)
    store = make_store(algo.spec, algo.data, 4)
    store.put(traj)
    winners = {}
    for b in range(4):
        begun = 0
        for t in range(traj.shape[0]):
            if traj.terminated[t, b]:
                for k in range(begun, t + 1):
                    sign = 1 if (t - k) % 2 == 0 else -1
                    winners[traj.obs[k, b].tobytes(), sign * float(traj.reward[t, b])] = True
                begun = t + 1
    rows = store._columns
    for k in range(store._size):
        assert (rows["obs.0"][k].tobytes(), float(rows["outcome"][k])) in winners
    assert {-1.0, 1.0} <= set(rows["outcome"][: store._size].tolist())


def test_the_loss_is_the_stated_one():
    _, _, algo, model = played(value_coef=0.5)
    rng = np.random.default_rng(3)
    legal = rng.random((32, 9)) < 0.7
    legal[:, 0] = True
    better = np.where(legal, rng.random((32, 9)), 0).astype(np.float32)
    better /= better.sum(1, keepdims=True)
    searched = rng.random(32) < 0.6
    obs = rng.integers(0, 2, (32, 2, 3, 3)).astype(np.float32)
    outcome = rng.choice([-1.0, 0.0, 1.0], 32).astype(np.float32)
    batch = Positions(obs, outcome, {"better": better, "legal": legal, "searched": searched})
    output = loss_of(algo, model, None, batch)
    found = output.loss.item()
    params, value = (out.detach().numpy() for out in model(torch.from_numpy(obs)))
    cross_entropy, entropy = [], []
    for i in range(32):
        allowed = params[i][legal[i]]
        log_pi = allowed - np.log(np.exp(allowed).sum())
        entropy.append(-(np.exp(log_pi) * log_pi).sum())
        if searched[i]:
            cross_entropy.append(-(better[i][legal[i]] * log_pi).sum())
    by_hand = np.mean(cross_entropy) + 0.5 * np.mean((value - outcome) ** 2)
    assert found == pytest.approx(by_hand, rel=1e-4)
    assert output.rows == searched.sum()  # learners with shares of a batch are weighted by them
    assert output.metrics["loss/entropy"].item() == pytest.approx(np.mean(entropy), rel=1e-4)
    explained = 1 - np.var(outcome - value) / np.var(outcome)
    assert output.metrics["loss/explained_variance"] == pytest.approx(explained, rel=1e-4)


def test_quick_searches_are_learned_from_as_outcomes_only():
    traj, policy, *_ = played(steps=40, num_simulations=16, fast_simulations=4, full_search_fraction=0.25)
    searched = traj.extras["searched"]
    assert 0.15 < searched.mean() < 0.35
    assert not traj.extras["better"][~searched].any()
    assert policy.simulator_steps < 0.6 * 16 * searched.size


def test_scripted_players_give_no_policy_targets():
    traj, *_ = played(steps=60, num_envs=16, opponent_fraction=1.0, opponents=("perfect",), temperature_moves=0)
    by_search, turn = traj.extras["searched"], traj.extras["to_play"]
    for t, b in zip(*np.nonzero(~by_search), strict=True):
        own, every = (int(sum(1 << k for k in np.flatnonzero(plane))) for plane in _planes(traj.obs[t, b]))
        assert traj.action[t, b] in best_moves(own, every)
    game = np.cumsum(traj.first[:-1], 0)
    for b in range(16):  # within a game, each side is always the same player
        for number in np.unique(game[:, b]):
            rows = game[:, b] == number
            kinds = {(int(turn[t, b]), bool(by_search[t, b])) for t in np.flatnonzero(rows)}
            assert len(kinds) <= 2
            assert len({side for side, _ in kinds}) == len(kinds)
    assert {0, 1} == set(turn[by_search].tolist())  # it begins in some games, and not in others


def _planes(obs):
    own, other = obs.reshape(2, 9)
    return own, own + other


def test_past_selves_play_their_share_with_weights_of_their_own():
    with corral.make_vec(ENV, 8, "local") as vec:
        algo = AlphaZero(Config(num_simulations=4, net=SMALL, past_self_fraction=0.5), vec.spec, 8)
        model = algo.build_model()
        policy = algo.make_policy(model, explore=True, rng=np.random.default_rng(0))
        with Sampler(vec, policy) as sampler:
            rollouts = sampler.rollouts(40)
            traj = next(rollouts)
            assert 0.05 < (~traj.extras["searched"]).mean() < 0.45
            kept = {name: value.clone() for name, value in policy._past[0].items()}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
            next(rollouts)
            assert all(torch.equal(value, policy._past[0][name]) for name, value in kept.items())
            policy.set_context(ActContext(0.06))  # a past self is kept after every 5 % of the run
            next(rollouts)
            assert len(policy._past) == 2


def test_the_same_seed_plays_the_same_games_and_another_does_not():
    def moves(seed):
        return played(steps=30, seed=seed)[0].action

    np.testing.assert_array_equal(moves(1), moves(1))
    assert (moves(1) != moves(2)).any()


def test_stopped_run_resumes_exactly(tmp_path):
    settings = {
        "env": ENV, "seed": 3, "num_simulations": 4, "num_envs": 8, "learning_starts": 100, "batch_size": 32,
        "hidden_sizes": (16,),
        "eval_episodes": 0, "buffer_size": 2_000,
    }  # fmt: skip
    corral.train("alphazero", steps=1_600, run_dir=tmp_path / "whole", **settings)
    corral.train("alphazero", steps=800, run_dir=tmp_path / "half", final_lr_fraction=1.0, **settings)
    corral.train("alphazero", steps=1_600, run_dir=tmp_path / "again", final_lr_fraction=1.0, **settings)
    corral.resume(tmp_path / "half", steps=1_600)
    one, other = (corral.load_policy(tmp_path / name, "latest").model.state_dict() for name in ("half", "again"))
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_tictactoe_is_learned_against_perfect_player(tmp_path):
    """Seconds of self-play; that it never wins after a minute is a claim of BENCHMARKS.md."""
    result = corral.train(
        "alphazero", env=ENV, steps=25_000, seed=1, run_dir=tmp_path / "x", preset="none", num_envs=32,
        num_simulations=32,
        learning_starts=2_000, batch_size=256, replay_ratio=8.0, hidden_sizes=(128, 128), temperature_moves=9,
        eval_episodes=50,
        eval_env_kwargs={"opponent": "perfect"}, eval_every=25_000,
    )  # fmt: skip
    assert result.eval_return > -0.4  # at random it is -0.9
    loaded = corral.load_policy(tmp_path / "x")
    board = np.zeros((2, 3, 3), np.float32)
    board[0, 0, :2] = 1  # two in a row: the network alone completes it
    board[1, 1, :2] = 1
    assert loaded(board) == 2


@pytest.mark.parametrize("runtime", ["inline", pytest.param("process", marks=pytest.mark.slow)])
def test_two_actors_feed_one_learner(runtime, tmp_path):
    result = corral.train(
        "alphazero", env=ENV, steps=3_000, seed=1, run_dir=tmp_path / "x", topology="actor_learner", actors=2,
        runtime=runtime, num_envs=8, num_simulations=4, learning_starts=200, batch_size=32, hidden_sizes=(16,),
        eval_episodes=2,
    )  # fmt: skip
    assert result.version > 50


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_simulations": 0}, "num_simulations must be at least 1"),
        ({"past_self_fraction": 0.7, "opponent_fraction": 0.6}, "both fractions of all games, exceed 1"),
        ({"past_self_fraction": "0:0.9@0.5", "opponent_fraction": "0.5:0"}, "both fractions of all games, exceed 1"),
        ({"opponents": (), "opponent_fraction": 0.5}, "needs opponents"),
        ({"full_search_fraction": 0.0}, "full_search_fraction"),
        ({"value_coef": -1.0}, "value_coef"),
    ],
)
def test_invalid_settings_are_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        Config(**changes)


@pytest.mark.parametrize(
    ("env", "kwargs", "best"),
    [
        (ENV, {"eval_env_kwargs": {"opponent": "random"}}, True),
        (ENV, {"eval_env_kwargs": {}}, False),
        ("corral.envs.suites.games:PettingZoo", {"env_kwargs": {"game": "tictactoe_v3"}}, False),
    ],
)
def test_games_against_itself_choose_no_best_checkpoint(tmp_path, env, kwargs, best):
    result = corral.train(
        "alphazero", env=env, steps=200, num_envs=4, num_simulations=2, learning_starts=50, batch_size=16,
        hidden_sizes=(16,),
        backend="local", run_dir=tmp_path, **({"eval_episodes": 2} | kwargs),
    )  # fmt: skip
    assert (tmp_path / "checkpoints" / "best").exists() == best
    assert ("no_opponent" in (tmp_path / "events.jsonl").read_text()) == (not best)
    assert np.isnan(result.best_return) == (not best)
    assert corral.load_policy(tmp_path).step == result.steps or best


def test_past_selves_may_take_over_from_scripted_players():
    Config(past_self_fraction="0:0.8", opponent_fraction="0.8:0")


def test_outcomes_are_not_scaled(tmp_path):
    """Values of scaled rewards would meet rewards that are not in a search."""
    with pytest.raises(UserError, match="set normalize_reward=false"):
        corral.train("alphazero", env=ENV, steps=100, normalize_reward=True, run_dir=tmp_path / "x")


def test_an_environment_for_one_is_left_to_ppo(tmp_path):
    with pytest.raises(UserError, match="ppo-search"):
        corral.train("alphazero", env="CartPole-v1", steps=100, run_dir=tmp_path / "x")


def test_continuous_actions_are_refused(tmp_path):
    with pytest.raises(UserError, match="needs discrete actions"):
        corral.train("alphazero", env="Pendulum-v1", steps=100, run_dir=tmp_path / "x")


def test_games_are_the_size_that_the_network_sees():
    assert TICTACTOE.shape == (2, 3, 3)
    assert CONNECT4.shape == (2, 6, 7)


class MoveAgain(AECEnv):
    """Action 1 lets the same player move once more; who makes the fifth move wins."""

    metadata = {"name": "move_again"}  # noqa: RUF012 - as PettingZoo has it

    def __init__(self):
        super().__init__()
        self.possible_agents, self.render_mode = ["one", "other"], None

    def observation_space(self, agent):
        seen = spaces.Box(0, 10, (2,), np.float32)
        return spaces.Dict(observation=seen, action_mask=spaces.Box(0, 1, (2,), np.int8))

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.agent_selection, self.moves = self.possible_agents[:], "one", 0
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0), dict.fromkeys(self.agents, 0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}

    def observe(self, agent):
        return {"observation": np.float32([self.moves, agent == "one"]), "action_mask": np.ones(2, np.int8)}

    def step(self, action):
        mover, self.moves = self.agent_selection, self.moves + 1
        waiting = next(agent for agent in self.agents if agent != mover)
        if self.moves == 5:
            self.rewards, self.terminations = {mover: 1, waiting: -1}, dict.fromkeys(self.agents, True)
        self.agent_selection = mover if action else waiting


def test_player_to_move_is_recorded_without_alternation():
    with corral.make_vec(lambda: AecEnv(MoveAgain()), 4, "local") as vec:
        algo = AlphaZero(Config(num_simulations=4, net=SMALL, temperature_moves=99), vec.spec, 4)
        policy = algo.make_policy(algo.build_model(), explore=True, rng=np.random.default_rng(0))
        with Sampler(vec, policy) as sampler:
            traj = next(sampler.rollouts(50))
    np.testing.assert_array_equal(traj.extras["to_play"], 1 - traj.obs[:-1, ..., 1])
    assert (np.diff(traj.extras["to_play"], axis=0) == 0).any()


def test_only_own_moves_are_recorded_against_env_opponent():
    with corral.make_vec(ENV, 8, "local", env_kwargs={"opponent": "random"}) as vec:
        algo = AlphaZero(Config(num_simulations=4, net=SMALL), vec.spec, 8)
        policy = algo.make_policy(algo.build_model(), explore=True, rng=np.random.default_rng(0))
        with Sampler(vec, policy) as sampler:
            traj = next(sampler.rollouts(40))
    turn, goes_on = traj.extras["to_play"], ~traj.first[1:-1]
    assert (turn[1:][goes_on] == turn[:-1][goes_on]).all()
    assert set(turn.ravel().tolist()) == {0, 1}


def test_resumed_run_keeps_past_opponents():
    with corral.make_vec(ENV, 4, "local") as vec:
        algo = AlphaZero(Config(num_simulations=2, net=SMALL, past_self_fraction=0.5), vec.spec, 4)
        policy = algo.make_policy(algo.build_model(), explore=True, rng=np.random.default_rng(0))
        policy.set_context(ActContext(0.8))
        with Sampler(vec, policy) as sampler:
            next(sampler.rollouts(20))
    assert len(policy._past) == 1
