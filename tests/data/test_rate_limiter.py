"""The rate limiter by itself."""

import pytest

from corral.data.rate_limiter import RateLimiter


@pytest.mark.parametrize("ratio", [0.1, 0.3, 1.0, 8.0])
def test_samples_follow_inserts_at_the_configured_ratio(ratio):
    limiter = RateLimiter(ratio, min_size=100, tolerance=64)
    for _ in range(5000):
        assert limiter.may_insert() or limiter.may_sample(32)
        if limiter.may_sample(32):
            limiter.sampled += 32
        else:
            limiter.inserted += 4
    assert ratio * (limiter.inserted - 100) - 32 <= limiter.sampled <= ratio * (limiter.inserted - 100) + 1e-3


def test_no_samples_below_minimum_size_and_no_burst():
    limiter = RateLimiter(8.0, min_size=100, tolerance=64)
    limiter.inserted = 99
    assert not limiter.may_sample(1)
    limiter.inserted = 100
    assert not limiter.may_sample(32)
    limiter.inserted = 104
    assert limiter.may_sample(32)
    limiter.sampled = 32
    assert not limiter.may_sample(1)


def test_inserts_wait_for_samples_that_are_owed():
    limiter = RateLimiter(1.0, min_size=1, tolerance=64)
    limiter.inserted = 65
    assert limiter.may_insert()
    limiter.inserted = 66
    assert not limiter.may_insert()
    limiter.sampled = 32
    assert limiter.may_insert()


def test_counts_survive_a_checkpoint():
    limiter, other = (RateLimiter(1.0, 1, 64) for _ in range(2))
    limiter.inserted, limiter.sampled = 17, 4
    other.load_state_dict(limiter.state_dict())
    assert (other.inserted, other.sampled, other.available_samples) == (17, 4, limiter.available_samples)
