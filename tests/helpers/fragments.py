"""Made-up experience whose every number is known, and a replay that stores everything."""

import numpy as np
from gymnasium import spaces

from corral.core.types import EnvSpec, Trajectory

VECTOR = EnvSpec(spaces.Box(-1e9, 1e9, (3,), np.float32), spaces.Discrete(5))
PIXELS = EnvSpec(spaces.Box(0, 255, (4, 16, 17), np.uint8), spaces.Discrete(5))
MIXED = EnvSpec(
    spaces.Dict({"screen": spaces.Box(0, 255, (3, 16, 16), np.uint8), "speed": spaces.Box(-9, 9, (2,), np.float64)}),
    spaces.Dict({"move": spaces.Discrete(4), "aim": spaces.Box(-1, 1, (2,), np.float32)}),
)
RGB = EnvSpec(spaces.Box(0, 255, (3, 16, 16), np.uint8), spaces.Discrete(5))


class Stream:
    """One environment that makes up observations; screens are stacks of the last frames."""

    def __init__(self, spec, seed, end=0.15, fault=0.0, stacked=True, fill="first"):
        self.spec, self.rng = spec, np.random.default_rng(seed)
        self.end, self.fault, self.stacked, self.fill = end, fault, stacked, fill
        self.obs = self.observe(True)
        self.first = True

    def observe(self, reset):
        leaves = []
        for i, leaf in enumerate(self.spec.observation.leaves):
            if leaf.dtype == np.uint8:
                new = self.rng.integers(0, 256, leaf.shape, dtype=np.uint8)
                if self.stacked and reset:
                    new[:-1] = new[-1] if self.fill == "first" else 0
                elif self.stacked:
                    new[:-1] = self.obs[i][1:]
            else:
                new = self.rng.normal(size=leaf.shape).astype(leaf.dtype)
            leaves.append(new)
        return leaves

    def step(self):
        row = {"obs": self.obs, "first": self.first, "final": None}
        row["action"] = [np.asarray(x) for x in self.spec.action.flatten(self.spec.action_space.sample())]
        row["faulty"] = self.rng.random() < self.fault
        ends = self.rng.random(2) < self.end
        row["terminated"], row["truncated"] = (False, True) if row["faulty"] else map(bool, ends)
        row["reward"] = 0.0 if row["faulty"] else float(np.float32(self.rng.normal()))
        done = row["terminated"] or row["truncated"]
        following = self.obs if row["faulty"] else self.observe(False)
        if done:
            row["final"] = following
            following = self.observe(self.rng.random() < 0.7)  # now and then the screen goes on, as after a lost life
        row["next"] = row["final"] if done else following
        self.obs, self.first = following, done
        return row


def fragment(streams, env_ids, length):
    """Step these streams, and return the trajectory and its rows, [T][B] dicts."""
    spec = streams[0].spec
    rows = [[streams[i].step() for i in env_ids] for _ in range(length)]
    layout = spec.observation

    def stack(leaves):  # [T][B] lists of leaves -> tree of [T, B, ...]
        count = len(leaves[0][0])
        return [np.stack([np.stack([cell[i] for cell in row]) for row in leaves]) for i in range(count)]

    def column(name):
        return np.array([[cell[name] for cell in row] for row in rows])

    obs = [[cell["obs"] for cell in row] for row in rows] + [[streams[i].obs for i in env_ids]]
    finals = [(t, b, c["final"]) for t, row in enumerate(rows) for b, c in enumerate(row) if c["final"] is not None]
    final_obs = [
        np.stack([f[2][i] for f in finals]) if finals else np.zeros((0, *leaf.shape), leaf.dtype)
        for i, leaf in enumerate(layout.leaves)
    ]
    traj = Trajectory(
        obs=layout.unflatten(stack(obs)),
        action=spec.action.unflatten(stack([[cell["action"] for cell in row] for row in rows])),
        reward=column("reward").astype(np.float32),
        raw_reward=column("reward"),
        terminated=column("terminated"),
        truncated=column("truncated"),
        faulty=column("faulty"),
        first=np.concatenate([column("first"), [[streams[i].first for i in env_ids]]]),
        env_id=np.array(env_ids, np.int64),
        final_at=np.array([f[:2] for f in finals], np.int64).reshape(-1, 2),
        final_obs=layout.unflatten(final_obs),
    )
    return traj, rows


class NaiveReplay:
    """Stores every transition whole, in the order in which they are complete."""

    def __init__(self, n, gamma, num_envs):
        self.n, self.gamma = n, gamma
        self.waiting = [[] for _ in range(num_envs)]
        self.rows = []

    def put(self, rows, env_ids):
        """Rows come out sorted by the time of their first step, then by column, as the store puts them in."""
        done = []
        for b, i in enumerate(env_ids):
            waiting = self.waiting[i]
            for t, row in enumerate(r[b] for r in rows):
                if row["faulty"]:
                    done += [
                        (start, b, self.window([w for _, w in waiting[k:]])) for k, (start, _) in enumerate(waiting)
                    ]
                    waiting.clear()
                    continue
                waiting.append((t, row))
                if row["terminated"] or row["truncated"]:
                    done += [
                        (start, b, self.window([w for _, w in waiting[k:]])) for k, (start, _) in enumerate(waiting)
                    ]
                    waiting.clear()
                elif len(waiting) == self.n:
                    done.append((waiting[0][0], b, self.window([w for _, w in waiting])))
                    waiting.pop(0)
            self.waiting[i] = [(t - len(rows), row) for t, row in waiting]
        self.rows += [window for _, _, window in sorted(done, key=lambda d: d[:2])]

    def window(self, steps):
        reward = sum(self.gamma**j * s["reward"] for j, s in enumerate(steps))
        discount = 0.0 if steps[-1]["terminated"] else self.gamma ** len(steps)
        return {
            "obs": steps[0]["obs"],
            "action": steps[0]["action"],
            "reward": reward,
            "discount": discount,
            "next_obs": steps[-1]["next"],
        }


def assert_rows_equal(spec, batch, expected):
    """Assert that a batch of transitions has these naive rows."""
    for name, layout in (("obs", spec.observation), ("next_obs", spec.observation), ("action", spec.action)):
        for i, leaf in enumerate(layout.flatten(getattr(batch, name))):
            np.testing.assert_array_equal(leaf, np.stack([row[name][i] for row in expected]), err_msg=name)
    np.testing.assert_allclose(batch.reward, [row["reward"] for row in expected], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(batch.discount, [row["discount"] for row in expected], rtol=1e-6)
