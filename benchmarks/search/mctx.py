"""mctx's `muzero_policy` with pgx's Connect Four as an engine of `python -m benchmarks search`."""

from __future__ import annotations

from functools import partial
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import mctx
import numpy as np
import pgx

from benchmarks.search.engine import Work
from benchmarks.search.task import C_BASE, C_INIT, COLUMNS, PLANES, Array, Problem, SearchTask

_CHUNK = 1 << 15


class Mctx:
    """A search is one compiled function; game states are the embeddings of its nodes."""

    version = f"{metadata.version('mctx')}, pgx {metadata.version('pgx')}, jax {metadata.version('jax')}"

    def __init__(self, problem: Problem):
        self._layers = [tuple(map(jnp.asarray, layer)) for layer in problem.layers]
        self._env = pgx.make("connect_four")
        self._step = jax.jit(jax.vmap(self._env.step))
        self._roots = self._play(problem.prefixes)
        self.node_bytes: float | None = None

    def perft(self, depth: int) -> list[int]:
        """With pgx's rules, in chunks of equal size, so that few functions are compiled."""
        states = _take(self._start(1), np.zeros(1, int))
        counts = []
        for _ in range(depth):
            above, columns = np.nonzero(np.asarray(states.legal_action_mask))
            pieces, alive = [], []
            for at in range(0, len(above), _CHUNK):
                rows, moves = above[at : at + _CHUNK], columns[at : at + _CHUNK]
                room = 1 << max(6, int(np.ceil(np.log2(len(rows)))))
                padded = np.pad(rows, (0, room - len(rows))), np.pad(moves, (0, room - len(rows)))
                piece = self._step(_take(states, padded[0]), jnp.asarray(padded[1]))
                pieces.append(_take(piece, np.arange(len(rows))))
                alive.append(~np.asarray(pieces[-1].terminated))
            counts.append(len(above))
            merged = jax.tree_util.tree_map(lambda *parts: np.concatenate([np.asarray(p) for p in parts]), *pieces)
            states = _take(merged, np.flatnonzero(np.concatenate(alive)))
        return counts

    def outputs(self) -> Array:
        """With pgx's observations, in the common orientation."""
        logits, value = jax.jit(self._evaluate)(self._roots)
        return np.concatenate([np.asarray(logits), np.asarray(value)[:, None]], 1)

    def prepare(self, task: SearchTask) -> MctxSearcher:
        """The search is compiled when it is first used."""
        searcher = MctxSearcher(partial(self._search, zero=task.evaluator == "zero", sims=task.sims), self._roots, task)
        self.node_bytes = searcher.node_bytes
        return searcher

    def _start(self, count: int) -> Any:
        return jax.vmap(self._env.init)(jax.random.split(jax.random.PRNGKey(0), count))

    def _play(self, prefixes: Any) -> Any:
        states, moves = self._start(len(prefixes)), max(map(len, prefixes))
        for k in range(moves):
            columns = jnp.asarray([played[k] if k < len(played) else 0 for played in prefixes])
            on = jnp.asarray([k < len(played) for played in prefixes])
            after = self._step(states, columns)
            states = jax.tree_util.tree_map(
                lambda new, old: jnp.where(on.reshape(-1, *[1] * (new.ndim - 1)), new, old),  # noqa: B023
                after,
                states,
            )
        return states

    def _evaluate(self, states: Any) -> Any:
        planes = jax.vmap(self._env.observe)(states)  # [B, 6, 7, 2] from above
        x = jnp.transpose(planes[:, ::-1], (0, 3, 1, 2)).astype(jnp.float32).reshape(-1, PLANES)
        for weight, bias in self._layers[:-1]:
            x = jnp.maximum(x @ weight + bias, 0.0)
        x = x @ self._layers[-1][0] + self._layers[-1][1]
        return x[:, :-1], x[:, -1]

    def _judge(self, states: Any, zero: bool) -> Any:
        count = states.terminated.shape[0]
        logits, value = (jnp.zeros((count, COLUMNS)), jnp.zeros(count)) if zero else self._evaluate(states)
        logits = jnp.where(states.legal_action_mask, logits, jnp.finfo(logits.dtype).min)
        return logits, jnp.where(states.terminated, 0.0, value)

    def _recur(self, params: Any, key: Any, action: Any, states: Any, *, zero: bool) -> Any:
        player = states.current_player
        after = jax.vmap(self._env.step)(states, action)
        logits, value = self._judge(after, zero)
        reward = jnp.take_along_axis(after.rewards, player[:, None], 1)[:, 0]
        discount = jnp.where(after.terminated, 0.0, -1.0)
        return mctx.RecurrentFnOutput(reward=reward, discount=discount, prior_logits=logits, value=value), after

    def _search(self, states: Any, key: Any, *, zero: bool, sims: int) -> Any:
        logits, value = self._judge(states, zero)
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=states)
        found = mctx.muzero_policy(
            (), key, root, partial(self._recur, zero=zero), sims, invalid_actions=~states.legal_action_mask,
            qtransform=_as_corral, dirichlet_fraction=0.0, pb_c_init=C_INIT, pb_c_base=C_BASE, temperature=0.0,
        )  # fmt: skip
        return jnp.argmax(found.action_weights, -1), found.search_tree


class MctxSearcher:
    """A compiled search."""

    def __init__(self, search: Any, roots: Any, task: SearchTask):
        def moves(states: Any, key: Any) -> Any:
            return search(states, key)[0]

        self._search, self._roots, self._task = jax.jit(moves), roots, task
        first = _take(roots, np.arange(task.trees) % len(roots.terminated))
        tree = jax.eval_shape(search, first, jax.random.PRNGKey(0))[1]
        sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree_util.tree_leaves(tree)]
        self.node_bytes = sum(sizes) / (task.trees * (task.sims + 1))
        self.work = Work()

    def decide(self, rows: Array) -> Array:
        moves = np.asarray(self._search(_take(self._roots, rows), jax.random.PRNGKey(0)))
        calls = self._task.sims + 1 if self._task.evaluator == "network" else 0
        self.work.add(calls, calls * len(rows), self._task.sims * len(rows))
        return moves


def _as_corral(tree: Any, node: Any) -> Any:
    """Scale values from -1..1 to 0..1; an unvisited action has the mean of its node."""
    q = jnp.where(tree.children_visits[node] > 0, tree.qvalues(node), tree.node_values[node])
    return (q + 1.0) / 2.0


def _take(states: Any, rows: Any) -> Any:
    return jax.tree_util.tree_map(lambda leaf: leaf[rows], states)
