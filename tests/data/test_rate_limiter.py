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


@pytest.mark.parametrize("ratio", [16.0, 0.5])
def test_a_changed_ratio_counts_from_now_on(ratio):
    before, after = RateLimiter(4.0, 100, 64), RateLimiter(ratio, 100, 64)
    before.inserted, before.sampled = 10_100, 39_990
    after.load_state_dict(before.state_dict())
    assert (after.sampled, after.available_samples) == (39_990, before.available_samples)
    after.inserted += 100
    assert after.available_samples == before.available_samples + 100 * ratio
    again = RateLimiter(ratio, 100, 64)
    again.load_state_dict(after.state_dict())
    assert again.available_samples == after.available_samples


@pytest.mark.parametrize(("inserted", "least"), [(500, 10), (500, 2_000), (1_500, 2_000)])
def test_another_minimum_size_starts_without_a_burst(inserted, least):
    before, after = RateLimiter(4.0, 1_000, 64), RateLimiter(4.0, least, 64)
    before.inserted, before.sampled = inserted, 4 * max(0, inserted - 1_000)
    after.load_state_dict(before.state_dict())
    after.inserted = max(inserted, least)
    assert after.available_samples == 0
