"""Games as environments: legal moves, whose reward it is, who begins, and all that environments are used for."""

import zlib

import gymnasium
import numpy as np
import pytest

import corral
from corral.acting.policy import as_policy
from corral.config.experiment import Experiment
from corral.core.errors import UserError
from corral.core.gym_env import legal
from corral.envs.suites.games import Connect4, TicTacToe
from corral.envs.suites.games.connect4 import CONNECT4
from corral.runs.checkpoints.state_files import read_state, write_state
from corral.runs.views.video import record_policy
from corral.testing import check_env

FACTORIES = {"corral/Connect4-v0": Connect4, "corral/TicTacToe-v0": TicTacToe}


def play_on(env, rng, moves=1000):
    """Random legal moves until the game ends; the last step."""
    mask = env.unwrapped.action_mask()
    for _ in range(moves):
        step = env.step(rng.choice(np.flatnonzero(mask)))
        mask = step[4]["action_mask"]
        if step[2]:
            break
    return step


def random_legal(obs):
    """What is legal in these games can be seen: columns with room at the top, free squares. Rows decide alone."""
    taken = np.asarray(obs).sum(1)
    free = taken[:, -1] == 0 if taken.shape[1:] == (6, 7) else taken.reshape(len(taken), -1) == 0
    dice = [np.random.default_rng(zlib.crc32(row)) for row in obs]
    return np.array([rng.choice(np.flatnonzero(row)) for rng, row in zip(dice, free, strict=True)])


@pytest.mark.parametrize("name", FACTORIES)
def test_moves_alternate_and_reward_is_the_movers(name):
    env, rng = FACTORIES[name](), np.random.default_rng(0)
    rewards = set()
    for _ in range(50):
        obs, info = env.reset()
        over = False
        while not over:
            assert env.to_play == int(obs.sum()) % 2
            move = rng.choice(np.flatnonzero(info["action_mask"]))
            before = obs
            obs, reward, over, truncated, info = env.step(move)
            np.testing.assert_array_equal(obs[0], before[1])  # seen by the other
            assert (obs[1] - before[0]).sum() == 1
            assert not truncated
            rewards.add(reward)
            assert over or reward == 0
        assert not env.action_mask().any()
    assert rewards == {0.0, 1.0}


def test_illegal_move_is_refused_without_effect():
    env = TicTacToe()
    env.reset()
    env.step(4)
    before = env.row.copy()
    for move in (4, 9, -1):
        with pytest.raises(ValueError, match=rf"TicTacToe: {move} is not a legal move here; legal: 0, 1, 2, 3, 5, 6"):
            env.step(move)
    np.testing.assert_array_equal(env.row, before)
    assert env.to_play == 1


def test_a_game_that_is_over_takes_no_move_until_it_is_reset():
    env = TicTacToe()
    env.reset()
    for move in (0, 3, 1, 4, 2):
        _, reward, over, _, _ = env.step(move)
    assert (reward, over) == (1.0, True)
    with pytest.raises(ValueError, match="call reset"):
        env.step(8)
    env.reset()
    env.step(8)


@pytest.mark.parametrize("name", FACTORIES)
def test_opponent_game_alternates_who_begins(name):
    env, rng = FACTORIES[name](opponent="random"), np.random.default_rng(1)
    obs, _ = env.reset(seed=3)
    results, begins = [], []
    for _ in range(60):
        begins.append(int(obs.sum()) == 0)
        obs, reward, over, _, _ = play_on(env, rng)
        assert over
        if reward:  # who has moved last has won
            began_moved_last = int(obs.sum()) % 2 == 1
            assert began_moved_last == (begins[-1] == (reward > 0))
        results.append(reward)
        obs, _ = env.reset()
    assert begins in ([True, False] * 30, [False, True] * 30)
    assert {1.0, -1.0} <= set(results) <= {1.0, 0.0, -1.0}


def test_seed_decides_first_player_and_opponent_moves():
    def game(seed):
        env, seen = TicTacToe(opponent="random"), []
        for k in range(4):
            obs, info = env.reset(seed=seed if k == 0 else None)
            over = False
            while not over:
                seen.append(obs.tobytes())
                obs, _, over, _, info = env.step(int(np.flatnonzero(info["action_mask"])[0]))
        return seen

    assert game(5) == game(5)
    assert len({tuple(game(seed)) for seed in range(6)}) > 1


def test_opponent_is_a_function_or_a_name():
    def first_free(positions, rng):
        return np.argmax(~positions[:, 1:] >> np.arange(9) & 1, axis=1)

    first = TicTacToe(opponent=first_free)
    first.reset(seed=0)
    first.step(int(np.flatnonzero(first.action_mask())[-1]))
    assert int(first.row[1]) & 1  # square 0 is taken
    named = TicTacToe(opponent="corral.envs.suites.games.players:Random")
    named.reset(seed=0)
    play_on(named, np.random.default_rng(0))


@pytest.mark.parametrize("text", ["strong", "mcts:many", "mcts:0", "no_such_module:player", "json:player"])
def test_invalid_opponent_is_refused(text):
    with pytest.raises(UserError, match=r"player|simulation"):
        Connect4(opponent=text)


def test_saved_game_continues_exactly():
    env, other, rng = Connect4("random"), Connect4("random"), np.random.default_rng(0)
    env.reset(seed=1)
    play_on(env, rng, 3)
    state = env.state_dict()
    other.reset(seed=9)
    other.load_state_dict(state)
    for _ in range(3):
        seed = int(rng.integers(100))
        one, two = (play_on(e, np.random.default_rng(seed)) for e in (env, other))
        np.testing.assert_array_equal(one[0], two[0])
        assert one[1] == two[1]
        assert (env.reset()[0] == other.reset()[0]).all()


def test_boards_are_drawn_as_they_lie():
    env = Connect4(render_mode="ansi")
    env.reset()
    for move in (3, 3, 0):
        env.step(move)
    empty = ". . . . . . ."
    assert env.render().split("\n") == [empty] * 4 + [". . . O . . .", "X . . X . . ."]
    env = TicTacToe(render_mode="rgb_array")
    env.reset()
    blank = env.render()
    env.step(2)
    frame = env.render()
    assert frame.dtype == np.uint8
    assert frame.shape == blank.shape == (144, 144, 3)
    changed = np.argwhere((frame != blank).any(-1))
    assert changed[:, 0].max() < 48  # the first row
    assert changed[:, 1].min() >= 96  # the last column
    with pytest.raises(UserError, match="ansi or rgb_array"):
        TicTacToe(render_mode="human")


@pytest.mark.parametrize("name", FACTORIES)
def test_ids_factories_backends_and_the_checker_know_them(name):
    assert gymnasium.make(f"corral.envs.suites.games:{name}").unwrapped.game.name in name
    results = check_env(name, env_kwargs={"opponent": "random"}, steps=200)
    assert {result.status for result in results} == {"pass"}, results
    seen = []
    for env, backend in ((name, "local"), (FACTORIES[name], "local"), (name, "process")):
        with corral.make_vec(env, 3, backend, seed=4, env_kwargs={"opponent": "random"}) as vec:
            sampler = corral.Sampler(vec, random_legal)
            batch = next(sampler.rollouts(40))
            assert not vec.restarts
            seen.append(batch.reward.tobytes())
    assert seen[0] == seen[1] == seen[2]


def test_as_gymnasium_plays_them():
    with corral.make_vec("corral/TicTacToe-v0", 2, "local") as boards:
        vec = boards.as_gymnasium()
        obs, _ = vec.reset(seed=0)
        for _ in range(30):
            obs, reward, _, _, _ = vec.step(random_legal(obs))
            assert set(reward.tolist()) <= {0.0, 1.0}


def test_search_restores_the_boards():
    with corral.make_vec("corral/Connect4-v0", 2, "local") as vec:
        vec.recv()
        vec.send(np.array([0]), np.array([3]))
        vec.recv(env_ids=np.array([0]))
        states = vec.states()
        ids = states.save(np.arange(2))
        views = states.look(ids)
        assert views.to_play.tolist() == [1, 0]
        boards = [vec.environment(i).unwrapped for i in range(2)]
        kept = [board.row.copy() for board in boards]
        states.expand(ids, np.array([3, 3]), states.new_ids(2))
        for board, before in zip(boards, kept, strict=True):
            np.testing.assert_array_equal(board.row, before)
        for move in (0, 1, 0, 1, 0, 1, 0):
            *_, over, _, _ = boards[1].step(move)
        assert over
        states.load(ids, np.arange(2))
        np.testing.assert_array_equal(boards[1].row, CONNECT4.start(1)[0])
        assert [board.to_play for board in boards] == [1, 0]
        boards[1].step(6)


def test_a_game_can_be_filmed(tmp_path):
    film = record_policy(Experiment.make("ppo", "corral/Connect4-v0"), as_policy(random_legal), tmp_path / "game.mp4")
    assert film.path.stat().st_size > 0
    assert film.frames >= 8  # the empty board, and at least seven moves
    assert film.fps == 2


def test_resumed_run_continues_its_games(tmp_path):
    def played(vec, obs):
        seen = []
        for _ in range(20):
            vec.send(np.arange(2), random_legal(obs))
            batch = vec.recv()
            obs = batch.obs
            seen.append(batch.reward.tobytes() + obs.tobytes())
        return seen, obs

    make = {"env_kwargs": {"opponent": "random"}, "seed": 3}
    with corral.make_vec("corral/Connect4-v0", 2, "local", **make) as vec:
        vec.record_episodes()
        _, obs = played(vec, vec.recv().obs)
        files = write_state(tmp_path, vec.state_dict())
        expected, _ = played(vec, obs)
    with corral.make_vec("corral/Connect4-v0", 2, "local", **make) as vec:
        assert vec.load_state_dict(read_state(tmp_path, files)) == []
        assert played(vec, obs)[0] == expected


def test_actions_that_are_not_legal_are_exchanged_for_legal_ones():
    info = {"action_mask": np.array([0, 1, 0, 1], np.int8)}
    assert [int(legal(np.int64(action), info)) for action in range(4)] == [1, 1, 1, 3]
    assert legal(2, {}) == 2
    assert legal(2, {"action_mask": np.zeros(4, np.int8)}) == 2


def test_wrapped_game_is_searched_with_its_wrapper():
    with corral.make_vec(lambda: gymnasium.wrappers.TimeLimit(Connect4(), 10), 1, "local") as vec:
        vec.recv()
        with pytest.raises(UserError, match="TimeLimit changes: remove that wrapper"):
            vec.states()
