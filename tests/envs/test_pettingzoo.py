"""Games of PettingZoo: the same rules as ours, legal searches, and states that are exact."""

import copy
import sys

import numpy as np
import pytest

import corral
from corral.core.errors import UserError
from corral.envs.suites.games import Connect4, PettingZoo, TicTacToe
from corral.envs.suites.games.pettingzoo import copy_aec
from corral.planning.action_set import choose_action_set
from corral.planning.config import SearchConfig
from corral.planning.mcts.evaluation import RolloutEvaluation
from corral.planning.planner import Planner
from corral.testing import check_env

pytest.importorskip("pettingzoo")
KNOWN = ["connect_four_v3", "tictactoe_v3", "chess_v6", "go_v5"]


def without_masks():
    from pettingzoo.classic.connect_four.connect_four import raw_env

    class Game(raw_env):
        def observe(self, agent):
            return {"observation": super().observe(agent)["observation"]}

    return Game()


def with_masks_in_infos():
    from pettingzoo.classic.connect_four.connect_four import raw_env

    class Game(raw_env):
        def observe(self, agent):
            seen = super().observe(agent)
            self.infos[agent]["action_mask"] = seen["action_mask"]
            return seen["observation"]

    return Game()


def as_ours(name, obs):
    """Their planes [row, column, plane], rows from above, as ours."""
    planes = np.moveaxis(obs, 2, 0)
    return planes[:, ::-1] if name == "connect_four_v3" else planes


@pytest.mark.parametrize(("name", "ours"), [("connect_four_v3", Connect4), ("tictactoe_v3", TicTacToe)])
def test_its_games_are_the_same_as_ours(name, ours):
    env, own, rng = PettingZoo(name), ours(), np.random.default_rng(0)
    ends = set()
    for _ in range(30):
        (obs, info), (own_obs, own_info) = env.reset(), own.reset()
        over = False
        while not over:
            np.testing.assert_array_equal(info["action_mask"], own_info["action_mask"])
            np.testing.assert_array_equal(as_ours(name, obs), own_obs)
            assert env.to_play == own.to_play
            move = rng.choice(np.flatnonzero(info["action_mask"]))
            obs, reward, over, truncated, info = env.step(move)
            own_obs, own_reward, own_over, _, own_info = own.step(move)
            assert (reward, over, truncated) == (own_reward, own_over, False)
        ends.add(reward)
    assert 1.0 in ends


def test_an_illegal_move_is_refused_and_changes_nothing():
    env = PettingZoo("tictactoe_v3")
    env.reset()
    env.step(4)
    before = env.view()
    with pytest.raises(ValueError, match="tictactoe_v3: 4 is not a legal move here; legal: 0, 1, 2, 3, 5"):
        env.step(4)
    np.testing.assert_array_equal(env.view()[0], before[0])


def test_unsupported_game_is_refused_with_remedy():
    for game, message in (
        ("connect_for_v3", "choose connect_four_v3"),
        ("rps_v2", "has no mask of legal moves"),
        ("no_such_module:env", "not installed"),
    ):
        with pytest.raises(UserError, match=message):
            PettingZoo(game)
    with pytest.raises(UserError, match="has no mask of legal moves"):
        PettingZoo(f"{__name__}:without_masks")


def test_masks_may_also_be_in_infos():
    env = PettingZoo(f"{__name__}:with_masks_in_infos")
    obs, info = env.reset()
    assert obs.shape == (6, 7, 2)
    for _ in range(6):
        assert info["action_mask"].tolist() == [1] * 7
        _, _, _, _, info = env.step(2)
    assert info["action_mask"].tolist() == [1, 1, 0, 1, 1, 1, 1]


def test_the_checker_and_backends_play_it():
    results = check_env("corral.envs.suites.games:PettingZoo", env_kwargs={"game": "tictactoe_v3"}, steps=100)
    assert {result.status for result in results} == {"pass"}, results


@pytest.mark.parametrize("name", KNOWN)
def test_copy_continues_exactly_as_original(name):
    env, rng = PettingZoo(name), np.random.default_rng(0)
    env.reset(seed=0)
    for _ in range(5):
        env.step(rng.choice(np.flatnonzero(env.action_mask())))
    twin = copy.copy(env)
    twin.aec = copy_aec(env.aec)
    before = env.view()
    moves, seen = [], []
    while len(moves) < 20 and not any(twin.ends()):
        moves.append(int(rng.choice(np.flatnonzero(twin.action_mask()))))
        seen.append(twin.step(moves[-1]))
    for one, two in zip(before, env.view(), strict=True):
        assert one.tobytes() == two.tobytes()
    for move, expected in zip(moves, seen, strict=True):
        obs, *rest, _ = env.step(move)
        assert obs.tobytes() == expected[0].tobytes()
        assert tuple(rest) == expected[1:4]


@pytest.mark.parametrize("name", KNOWN[:2])
def test_states_step_like_env_and_leave_it_unchanged(name):
    env, rng = PettingZoo(name), np.random.default_rng(1)
    env.reset(seed=0)
    states = corral.Snapshots(env).states
    while not any(env.ends()):
        before = env.view()
        root = states.save(np.array([0]))
        views = states.look(root)
        assert views.obs[0].tobytes() == before[0].tobytes()
        legal = np.flatnonzero(views.legal[0])
        steps = states.expand(np.repeat(root, len(legal)), legal, states.new_ids(len(legal)))
        for one, two in zip(before, env.view(), strict=True):
            assert one.tobytes() == two.tobytes()
        k = int(rng.integers(len(legal)))
        rolled = states.rollout(root, legal[None, k : k + 1])
        obs, reward, terminated, truncated, info = env.step(legal[k])
        assert obs.tobytes() == steps.obs[k].tobytes() == rolled.obs[0].tobytes()
        assert (reward, terminated, truncated) == (steps.reward[k], steps.terminated[k], steps.truncated[k])
        assert (reward, terminated) == (rolled.reward[0, 0], rolled.terminated[0])
        assert steps.to_play[k] == env.to_play
        np.testing.assert_array_equal(steps.legal[k], info["action_mask"])
        states.drop(np.concatenate([root, steps.children]))
    assert len(states) == 0


def test_a_game_can_be_put_back():
    env = PettingZoo("connect_four_v3")
    env.reset()
    states = corral.Snapshots(env).states
    env.step(3)
    kept = states.save(np.array([0]))
    before = env.view()
    for move in (0, 1, 0, 1, 0, 1, 0):
        env.step(move)
    assert env.ends() == (True, False)
    states.load(kept, np.array([0]))
    assert env.view()[0].tobytes() == before[0].tobytes()
    env.step(0)  # and the state is still as it was
    assert states.look(kept).obs[0].tobytes() == before[0].tobytes()


def test_search_plays_legally_and_takes_a_win():
    with corral.make_vec(lambda: PettingZoo("connect_four_v3"), 2, "local") as vec:
        batch = vec.recv()
        states = vec.states()
        actions = choose_action_set(states.spec.action, 16)
        rng = np.random.default_rng(0)
        evaluate = RolloutEvaluation(states, actions, 8, 1.0, rng)
        planner = Planner(states, actions, evaluate, SearchConfig(root_selection="puct"), 2, 24, discount=1.0, rng=rng)
        ended = 0
        while ended < 2:
            plan = planner.plan(np.arange(2), batch.first)
            legal = np.array([vec.environment(i).unwrapped.action_mask() for i in range(2)])
            assert not plan.visits[legal == 0].any()
            vec.send(batch.env_ids, plan.best)
            batch = vec.recv()
            ended += int(batch.terminated.sum())
        assert vec.restarts == 0
        env = vec.environment(0).unwrapped
        env.reset()
        for move in (0, 6, 0, 6, 0, 5):
            env.step(move)
        assert planner.plan(np.array([0]), np.array([True]), noise=0.0).best.tolist() == [0]


def test_state_memory_is_bounded():
    env = PettingZoo("connect_four_v3")
    env.reset()
    states = corral.Snapshots(env, memory_mb=0.02).states
    with pytest.raises(UserError, match="memory_mb"):
        states.save(np.zeros(50, np.int64))


def test_hint_for_card_games_names_their_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "rlcard", None)
    for game in ("leduc_holdem_v4", "texas_holdem_v4"):
        with pytest.raises(UserError, match=r"pip install rlcard\."):
            PettingZoo(game)
    monkeypatch.setitem(sys.modules, "chess", None)
    monkeypatch.delitem(sys.modules, "pettingzoo.classic.chess_v6", raising=False)
    for name in [name for name in sys.modules if name.startswith("pettingzoo.classic.chess")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"pip install 'corral-rl\[games\]'"):
        PettingZoo("chess_v6")


def test_hidden_cards_are_not_searched():
    env = PettingZoo("connect_four_v3")
    raw = type(env.aec.unwrapped)
    env.aec.unwrapped.__class__ = type("raw_env", (raw,), {"__module__": "pettingzoo.classic.rlcard_envs.leduc"})
    with pytest.raises(UserError, match="hidden cards"):
        corral.Snapshots(env)


def test_a_game_that_keeps_its_state_elsewhere_is_not_searched():
    env = PettingZoo("connect_four_v3")
    board = list(env.aec.unwrapped.board)
    raw = type(env.aec.unwrapped)
    shared = property(lambda self: board, lambda self, value: board.__setitem__(slice(None), value))
    env.aec.unwrapped.__dict__.pop("board")
    env.aec.unwrapped.__class__ = type("raw_env", (raw,), {"board": shared})
    env.reset()
    with pytest.raises(UserError, match="share state of this process"):
        corral.Snapshots(env).save()
