"""Returns and advantages against literal loops from the formulas, written without a recurrence."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.ops.returns import discounted_return, gae, lambda_return, nstep_return, vtrace

GAMMA = 0.9
FLAGS = [(False, False), (False, True), (True, False), (True, True)]  # terminated, truncated


class Data:
    def __init__(self, seed, length=12, width=3, dtype=np.float64, ends=0.2, faults=0.1):
        rng = np.random.default_rng(seed)
        self.shape = length, width
        normal = lambda: rng.normal(size=self.shape).astype(dtype)  # noqa: E731
        self.reward, self.value, self.next_value = normal(), normal(), normal()
        self.terminated, self.truncated = (rng.random(self.shape) < ends for _ in range(2))
        self.faulty = rng.random(self.shape) < faults
        self.truncated |= self.faulty
        self.terminated &= ~self.faulty
        self.reward[self.faulty] = 0
        self.mu = normal()
        self.pi = self.mu + rng.uniform(-2.5, 2.5, self.shape).astype(dtype)
        # where an episode goes on, the successor's value is the next row's
        goes_on = ~(self.terminated | self.truncated)[:-1] & ~self.faulty[1:]
        self.next_value[:-1][goes_on] = self.value[1:][goes_on]

    @property
    def flags(self):
        return self.terminated, self.truncated, self.faulty

    def reach(self, t, b):
        """How many rows from t on belong to one stretch of experience."""
        if self.faulty[t, b]:
            return 0
        m = 1
        while t + m < self.shape[0] and not (
            self.terminated[t + m - 1, b] or self.truncated[t + m - 1, b] or self.faulty[t + m, b]
        ):
            m += 1
        return m

    def delta(self, t, b):
        bootstrap = 0 if self.terminated[t, b] else self.next_value[t, b]
        return self.reward[t, b] + GAMMA * bootstrap - self.value[t, b]

    def nstep(self, t, b, n):
        m = min(n, self.reach(t, b))
        if m == 0:
            return 0.0
        bootstrap = 0 if self.terminated[t + m - 1, b] else self.next_value[t + m - 1, b]
        return sum(GAMMA**j * self.reward[t + j, b] for j in range(m)) + GAMMA**m * bootstrap

    def each(self, fn):
        return np.array([[fn(t, b) for b in range(self.shape[1])] for t in range(self.shape[0])])


def literal_gae(d, lam):
    return d.each(lambda t, b: sum((GAMMA * lam) ** j * d.delta(t + j, b) for j in range(d.reach(t, b))))


def literal_lambda(d, lam):
    """The weighted mean of all n-step returns: (1 - lam) lam^(n - 1), what is left on the longest."""

    def at(t, b):
        m = d.reach(t, b)
        shorter = sum((1 - lam) * lam ** (n - 1) * d.nstep(t, b, n) for n in range(1, m))
        return shorter + (lam ** (m - 1) * d.nstep(t, b, m) if m else 0.0)

    return d.each(at)


def literal_vtrace(d, rho_bar, c_bar, rho_pg, lam):
    ratio = np.exp(d.pi - d.mu)

    def vs(t, b):
        total, c = d.value[t, b], 1.0
        for j in range(d.reach(t, b)):
            total += GAMMA**j * c * min(rho_bar, ratio[t + j, b]) * d.delta(t + j, b)
            c *= lam * min(c_bar, ratio[t + j, b])
        return total

    def advantage(t, b):
        m = d.reach(t, b)
        if m == 0:
            return 0.0
        following = vs(t + 1, b) if m > 1 else d.next_value[t, b]
        bootstrap = 0 if d.terminated[t, b] else following
        return min(rho_pg, ratio[t, b]) * (d.reward[t, b] + GAMMA * bootstrap - d.value[t, b])

    return d.each(vs), d.each(advantage)


random_data = st.builds(
    Data,
    st.integers(0, 2**32 - 1),
    st.integers(1, 14),
    st.integers(1, 4),
    ends=st.sampled_from([0.0, 0.15, 0.5]),
    faults=st.sampled_from([0.0, 0.2, 0.6]),
)
lams = st.sampled_from([0.0, 0.3, 0.95, 1.0])


@settings(max_examples=60, deadline=None)
@given(random_data, lams)
def test_gae_is_the_sum_of_discounted_deltas(d, lam):
    advantage = gae(d.reward, d.value, d.next_value, *d.flags, GAMMA, lam)
    np.testing.assert_allclose(advantage, literal_gae(d, lam), atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(random_data, lams)
def test_lambda_return_equals_gae_plus_value(d, lam):
    target = lambda_return(d.reward, d.next_value, *d.flags, GAMMA, lam)
    np.testing.assert_allclose(target, literal_lambda(d, lam), atol=1e-12)
    advantage = gae(d.reward, d.value, d.next_value, *d.flags, GAMMA, lam)
    np.testing.assert_allclose(target[~d.faulty], (advantage + d.value)[~d.faulty], atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(random_data, st.integers(1, 16))
def test_n_step_return_sums_up_to_n_rewards(d, n):
    target = nstep_return(d.reward, d.next_value, *d.flags, GAMMA, n)
    np.testing.assert_allclose(target, d.each(lambda t, b: d.nstep(t, b, n)), atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(random_data)
def test_discounted_return_runs_to_the_end_of_the_episode(d):
    far = d.shape[0]
    with_value = discounted_return(d.reward, d.next_value, *d.flags, GAMMA)
    np.testing.assert_allclose(with_value, d.each(lambda t, b: d.nstep(t, b, far)), atol=1e-12)
    d.next_value[:] = 0
    plain = discounted_return(d.reward, None, *d.flags, GAMMA)
    np.testing.assert_allclose(plain, d.each(lambda t, b: d.nstep(t, b, far)), atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(random_data, st.sampled_from([(1.0, 1.0, 1.0), (2.0, 0.7, 1.5), (10.0, 10.0, 10.0)]), lams)
def test_vtrace_is_the_sum_of_corrected_deltas(d, bars, lam):
    vs, advantage = vtrace(d.mu, d.pi, d.reward, d.value, d.next_value, *d.flags, GAMMA, *bars, lam)
    expected_vs, expected_advantage = literal_vtrace(d, *bars, lam)
    np.testing.assert_allclose(vs, expected_vs, atol=1e-11)
    np.testing.assert_allclose(advantage, expected_advantage, atol=1e-11)


@settings(max_examples=60, deadline=None)
@given(random_data, st.sampled_from([(1.0, 1.0, 1.0), (2.0, 0.7, None), (10.0, 10.0, 10.0)]), lams)
def test_vtrace_of_tensors_is_that_of_arrays(d, bars, lam):
    columns = d.mu, d.pi, d.reward, d.value, d.next_value, *d.flags
    arrays = vtrace(*columns, GAMMA, *bars, lam)
    tensors = vtrace(*map(torch.from_numpy, columns), GAMMA, *bars, lam)
    for array, tensor in zip(arrays, tensors, strict=True):
        np.testing.assert_allclose(tensor.numpy(), array, atol=1e-11)


@settings(max_examples=30, deadline=None)
@given(random_data)
def test_on_policy_vtrace_is_the_n_step_return(d):
    vs, advantage = vtrace(d.mu, d.mu, d.reward, d.value, d.next_value, *d.flags, GAMMA)
    valid = ~d.faulty
    np.testing.assert_allclose(vs[valid], nstep_return(d.reward, d.next_value, *d.flags, GAMMA, d.shape[0])[valid])
    expected = lambda_return(d.reward, d.next_value, *d.flags, GAMMA, 1.0) - d.value
    np.testing.assert_allclose(advantage[valid], expected[valid], atol=1e-11)
    np.testing.assert_array_equal(vs[~valid], d.value[~valid])


@pytest.mark.parametrize(("terminated", "truncated"), FLAGS)
def test_termination_stops_bootstrap_any_end_stops_chain(terminated, truncated):
    """Two rows, the flags on the first: r = 1, 2; V = 10, 20; V' = 30 at the end (20 if none), 40 at last."""
    end = terminated or truncated
    reward, value = np.array([[1.0], [2.0]]), np.array([[10.0], [20.0]])
    next_value = np.array([[30.0 if end else 20.0], [40.0]])
    flags = np.array([[terminated], [False]]), np.array([[truncated], [False]]), np.zeros((2, 1), bool)
    gamma, lam = 0.5, 0.5
    bootstrap = 0.0 if terminated else 0.5 * next_value[0, 0]
    first_delta, last_delta = 1 + bootstrap - 10, 2 + 20 - 20
    chain = 0.0 if end else 1.0

    advantage = gae(reward, value, next_value, *flags, gamma, lam)
    assert advantage.ravel().tolist() == [first_delta + 0.25 * chain * last_delta, last_delta]
    full = 1 + (bootstrap if end else 0.5 * 2 + 0.25 * 40)
    for target in (
        nstep_return(reward, next_value, *flags, gamma, 2),
        lambda_return(reward, next_value, *flags, gamma, 1.0),
        discounted_return(reward, next_value, *flags, gamma),
        vtrace(value, value, reward, value, next_value, *flags, gamma)[0],
    ):
        assert target.ravel().tolist() == [full, 22.0]
    assert nstep_return(reward, next_value, *flags, gamma, 1)[0, 0] == 1 + bootstrap
    _, policy_advantage = vtrace(value, value, reward, value, next_value, *flags, gamma)
    assert policy_advantage[0, 0] == full - 10


def test_three_episodes_with_mixed_ends_by_hand():
    """gamma = lam = 0.5, r = 1, V = 2, V' = 4: deltas are 1 + 2 - 2 = 1, or 1 - 2 = -1 where terminated.

    Rows: two and terminated, two and truncated, one and both, one that goes on, a faulty one, one at last.
    """
    terminated = np.array([0, 1, 0, 0, 1, 0, 0, 0], bool)[:, None]
    truncated = np.array([0, 0, 0, 1, 1, 0, 1, 0], bool)[:, None]
    faulty = np.array([0, 0, 0, 0, 0, 0, 1, 0], bool)[:, None]
    flags = terminated, truncated, faulty
    ones = np.where(faulty, 0.0, 1.0)
    next_value = 4 * np.ones_like(ones)
    advantage = gae(ones, 2 * np.ones_like(ones), next_value, *flags, 0.5, 0.5)
    assert advantage.ravel().tolist() == [0.75, -1, 1.25, 1, -1, 1, 0, 1]
    two_steps = nstep_return(ones, next_value, *flags, 0.5, 2)
    assert two_steps.ravel().tolist() == [1.5, 1, 2.5, 3, 1, 3, 0, 3]
    assert lambda_return(ones, next_value, *flags, 0.5, 0.5).ravel().tolist() == [2.25, 1, 2.75, 3, 1, 3, 0, 3]
    to_go = discounted_return(ones, None, *flags, 0.5)
    assert to_go.ravel().tolist() == [1.5, 1, 1.5, 1, 1, 1, 0, 1]
    # half the ratio everywhere: corrections shrink by rho = c = 1/2 (exact in binary)
    mu, pi = np.zeros_like(ones), np.full_like(ones, np.log(0.5))
    vs, pg = vtrace(mu, pi, ones, 2 * ones, next_value, *flags, 0.5)
    np.testing.assert_allclose(vs.ravel(), [2.375, 1.5, 2.625, 2.5, 1.5, 2.5, 0, 2.5])
    np.testing.assert_allclose(pg.ravel(), [0.375, -0.5, 0.625, 0.5, -0.5, 0.5, 0, 0.5])


def test_faulty_nan_row_reaches_no_return():
    d = Data(3, faults=0.3)
    clean = [gae(d.reward, d.value, d.next_value, *d.flags, GAMMA, 0.9)]
    clean += [nstep_return(d.reward, d.next_value, *d.flags, GAMMA, 4)]
    clean += vtrace(d.mu, d.pi, d.reward, d.value, d.next_value, *d.flags, GAMMA)
    for array in (d.reward, d.next_value, d.mu):
        array[d.faulty] = np.nan
    dirty = [gae(d.reward, d.value, d.next_value, *d.flags, GAMMA, 0.9)]
    dirty += [nstep_return(d.reward, d.next_value, *d.flags, GAMMA, 4)]
    dirty += vtrace(d.mu, d.pi, d.reward, d.value, d.next_value, *d.flags, GAMMA)
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_huge_ratio_is_cut_without_a_warning():
    d = Data(1, dtype=np.float32)
    with np.errstate(all="raise"):
        vs, advantage = vtrace(d.mu, d.mu + 1000, d.reward, d.value, d.next_value, *d.flags, GAMMA)
    assert np.isfinite(vs).all()
    assert np.isfinite(advantage).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_results_keep_dtype_and_inputs(dtype):
    d = Data(5, dtype=dtype)
    before = [x.copy() for x in (d.reward, d.value, d.next_value, *d.flags, d.mu, d.pi)]
    results = [
        gae(d.reward, d.value, d.next_value, *d.flags, GAMMA, 0.95),
        lambda_return(d.reward, d.next_value, *d.flags, GAMMA, 0.95),
        nstep_return(d.reward, d.next_value, *d.flags, GAMMA, 5),
        discounted_return(d.reward, None, *d.flags, GAMMA),
        *vtrace(d.mu, d.pi, d.reward, d.value, d.next_value, *d.flags, GAMMA),
    ]
    assert all(x.dtype == dtype for x in results)
    for old, new in zip(before, (d.reward, d.value, d.next_value, *d.flags, d.mu, d.pi), strict=True):
        np.testing.assert_array_equal(old, new)
