"""Parameter groups: slices of the flat weights, one optimizer and one clip each, in every exchange."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.batches import batch_for
from helpers.learners import Learners
from helpers.short_runs import learn
from helpers.two_groups import Config, TwoGroups
from torch import nn

import corral
from corral.algos.base import ParamGroup, UpdateContext
from corral.core.errors import UserError
from corral.core.types import EnvSpec, LossOutput, Sample
from corral.learn.device import Precision
from corral.learn.learner import Learner
from corral.learn.weights import FlatParams, group_slices, split_params
from corral.nets.config import NetConfig

SPEC = EnvSpec(spaces.Box(-1e9, 1e9, (3,), np.float32), spaces.Discrete(4))
SMALL = NetConfig(hidden_sizes=(8, 8))
ALGO = "helpers.two_groups:TwoGroups"


def make(seed=0, **settings):
    torch.manual_seed(seed)
    algo = TwoGroups(Config(net=SMALL, **settings), SPEC, 4)
    model = algo.build_model()
    return Learner(algo, model, torch.Generator().manual_seed(1), Precision("fp32", ""))


def batch(learner, seed=0, **kwargs):
    return Sample(batch_for(learner.algo, learner.model, seed, **kwargs))


def test_each_group_is_a_contiguous_slice():
    learner = make()
    slices = [group.where for group in learner.flat.groups]
    assert slices == group_slices(learner.model, learner.algo.groups())
    assert (slices[0].start, slices[0].stop, slices[1].stop) == (0, slices[1].start, learner.flat.weights.numel())
    for group, where in zip(learner.flat.groups, slices, strict=True):
        group.weights.data.fill_(float(where.start + 1))
        group.grad.fill_(2.0)
        assert all((param == where.start + 1).all() and (param.grad == 2).all() for param in group.params)
    assert (learner.flat.weights[: slices[0].stop] == 1).all()
    assert (learner.flat.grad == 2).all()


@pytest.mark.parametrize("group", ["", "citric"])
def test_a_loss_of_an_unknown_group_names_the_groups(monkeypatch, group):
    learner = make()
    monkeypatch.setattr(learner.algo, "losses", lambda *args: iter([loss_of(learner, group)]))
    with pytest.raises(UserError, match=rf"LossOutput needs one of .* \('critic', 'actor'\), got '{group}'"):
        learner.step(batch(learner), 0.0)


def loss_of(learner, group):
    return LossOutput(sum(param.sum() for param in learner.model.parameters()), {}, group=group)


def returning(learner):
    return loss_of(learner, "critic")


def returning_in_a_generator(learner):
    return loss_of(learner, "critic")
    yield


def yielding_a_tensor(learner):
    yield loss_of(learner, "critic").loss


@pytest.mark.parametrize("losses", [returning, returning_in_a_generator, yielding_a_tensor])
def test_losses_that_yield_no_loss_output_are_named(monkeypatch, losses):
    learner = make()
    monkeypatch.setattr(learner.algo, "losses", lambda *args: losses(learner))
    with pytest.raises(UserError, match=r"TwoGroups.losses must yield a LossOutput \(`yield`, not `return`\)"):
        learner.step(batch(learner), 0.0)


def test_prefixes_given_as_one_string_are_refused():
    with pytest.raises(UserError, match=r"prefixes of a ParamGroup is a tuple: write \('value',\)"):
        ParamGroup(torch.optim.SGD, lambda progress: 0.1, prefixes="value")


def test_parameter_belongs_to_the_longest_prefix():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "ab": nn.Linear(2, 2)})
    groups = [ParamGroup(torch.optim.SGD, lambda progress: 0.1, name="a", prefixes=("a",)),
              ParamGroup(torch.optim.SGD, lambda progress: 0.1, name="ab", prefixes=("ab", "b"))]  # fmt: skip
    found = split_params(model, groups)
    assert [list(map(id, params)) for params in found] == [
        list(map(id, model["a"].parameters())), list(map(id, model["ab"].parameters()))
    ]  # fmt: skip


def test_parameters_without_group_and_empty_groups_are_errors():
    only = ParamGroup(torch.optim.SGD, lambda progress: 0.1, name="x", prefixes=("weight",))
    with pytest.raises(ValueError, match="bias belongs to no group"):
        FlatParams(nn.Linear(2, 2), [only])
    empty = ParamGroup(torch.optim.SGD, lambda progress: 0.1, name="none", prefixes=("nothing",))
    rest = ParamGroup(torch.optim.SGD, lambda progress: 0.1, name="all")
    with pytest.raises(ValueError, match="'none' is empty"):
        FlatParams(nn.Linear(2, 2), [rest, empty])


def test_groups_equal_two_torch_optimizers():
    """Against a literal loop: two optimizers, each gradient clipped, the second loss after the first step."""
    learner = make()
    torch.manual_seed(0)
    plain = learner.algo.build_model()
    plain.load_state_dict(learner.model.state_dict())
    named = dict(plain.named_parameters())
    members = [[p for n, p in named.items() if n.startswith("value_")], [p for n, p in named.items() if n[0] == "p"]]
    config, generator = learner.algo.config, torch.Generator().manual_seed(1)
    optimizers = [torch.optim.RMSprop(members[0], config.critic_lr, alpha=0.99, eps=1e-5),
                  torch.optim.Adam(members[1], config.actor_lr)]  # fmt: skip
    for k in range(5):
        sample, progress = batch(learner, k), k / 5
        ctx = UpdateContext(progress, generator)
        prepared = learner.algo.prepare(plain, sample.batch)
        optimizers[1].param_groups[0]["lr"] = config.actor_lr * (1 - progress)
        losses = learner.algo.losses(plain, None, prepared, ctx)
        for params, optimizer, limit in zip(members, optimizers, (0.5, 0.2), strict=True):
            plain.zero_grad()
            next(losses).loss.backward()
            nn.utils.clip_grad_norm_(params, limit)
            optimizer.step()
        outputs = learner.step(sample, progress)
        assert [output.group for output in outputs] == ["critic", "actor"]
        assert {"loss/critic_grad_norm", "loss/actor_grad_norm"} <= outputs[0].metrics.keys() | outputs[
            1
        ].metrics.keys()
    for name, param in learner.model.named_parameters():
        torch.testing.assert_close(param, named[name], atol=1e-6, rtol=1e-4)


def test_version_counts_updates_and_not_groups():
    learner = make()
    for k in range(3):
        learner.step(batch(learner, k), 0.0)
    assert learner.version == 3


def test_group_that_is_not_finite_is_left_out_alone():
    learner = make(critic_lr=1e-3)
    reports = []
    learner._report = reports.append
    sample = batch(learner)
    critic, actor = (group.weights.detach().clone() for group in learner.flat.groups)
    losses = learner.algo.losses

    def broken(*args):
        for output in losses(*args):
            if output.group == "critic":
                output.loss = output.loss * float("nan")
            yield output

    learner.algo.losses = broken
    (output,) = learner.step(sample, 0.0)
    assert output.group == "actor"
    assert torch.equal(learner.flat.groups[0].weights, critic)
    assert not torch.equal(learner.flat.groups[1].weights, actor)
    assert (learner.version, learner.skipped, len(reports)) == (1, 1, 1)


def test_state_of_every_group_is_saved():
    learner, other = make(), make(seed=3)
    for k in range(3):
        learner.step(batch(learner, k), 0.1)
    other.load_state_dict(learner.state_dict())
    assert learner.state_dict()["optimizer"].keys() == {"critic", "actor"}
    for k in range(3):
        sample = batch(learner, 10 + k)
        learner.step(sample, 0.5)
        other.step(sample, 0.5)
    assert torch.equal(learner.flat.weights, other.flat.weights)


def test_learning_rate_is_set_by_group():
    learner, other = make(), make()
    for group in (None, "", "critics"):
        with pytest.raises(UserError, match="'critic', 'actor'"):
            learner.set_learning_rate(1e-4, group)
    learner.set_learning_rate(1e-4, "actor")
    other.load_state_dict(learner.state_dict())
    assert other.learning_rates(0.5) == {"learn/lr_critic": 3e-3, "learn/lr_actor": 1e-4}
    learner.set_learning_rate(None, "actor")
    assert learner.learning_rates(0.5) == {"learn/lr_critic": 3e-3, "learn/lr_actor": 5e-4}


def test_learning_rate_must_not_be_negative():
    with pytest.raises(UserError, match="learning_rate must be at least 0"):
        make().set_learning_rate(-1e-3, "actor")


def test_state_without_learning_rates_keeps_the_schedule():
    """Checkpoints of earlier versions."""
    learner = make()
    state = learner.state_dict()
    del state["learning_rates"]
    learner.set_learning_rate(1e-4, "actor")
    learner.load_state_dict(state)
    assert learner.learning_rates(0.5)["learn/lr_actor"] == 5e-4


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("all_reduce", {}),
        ("all_reduce", {"compress": "topk:0.3"}),
        ("all_reduce", {"compress": "powersgd:2"}),
        ("param_server", {}),
        ("param_server", {"servers": 2}),
        ("param_server", {"servers": 2, "mode": "async"}),
        ("param_server", {"drop": 1}),
        ("gossip", {}),
    ],
)
def test_groups_in_every_exchange(kind, options):
    """Three learners with groups: all make the same updates where they are synchronous, and stay finite elsewhere."""
    probe = make()
    slices, start = group_slices(probe.model, probe.algo.groups()), probe.flat.weights.detach().clone()
    optimizers = [group.optimizer for group in probe.algo.groups()]

    learners = [make() for _ in range(3)]  # not in threads, which share torch's generator

    def work(exchange, rank):
        learner = learners[rank]
        learner._exchange = exchange
        if kind == "all_reduce":
            exchange._params = split_params(learner.model, learner.algo.groups())
        exchange.begin(learner.flat.weights.data, 0, 3)
        for k in range(4):
            learner.step(batch(learner, 10 * k + rank), k / 4)
        exchange.end()
        return learner.flat.weights.detach().clone(), learner.version

    with Learners(kind, 3, start, groups=slices, optimizer=optimizers, **options) as group:
        results = group.run(work)
        served = [server.state() for server in group.servers]
    weights = [weights for weights, _ in results]
    assert all(torch.isfinite(one).all() and not torch.equal(one, start) for one in weights)
    assert all(version == 4 for _, version in results)
    if kind == "all_reduce" or (kind == "param_server" and not {"mode", "drop"} & options.keys()):
        assert all(torch.equal(one, weights[0]) for one in weights)
    for state in served:
        assert [len(part["weights"]) > 0 for part in state["parts"]] == [True, True]
        assert all(part["optimizer"] for part in state["parts"])


def test_all_reduced_groups_equal_one_learner_with_all_rows():
    learners = [make(noise=0.0) for _ in range(2)]
    start = learners[0].flat.weights.detach().clone()

    def work(exchange, rank):
        learner = learners[rank]
        learner._exchange = exchange
        for k in range(4):
            learner.step(batch(learner, k), 0.0)  # the same batch everywhere: their mean is one learner's gradient
        return learner.flat.weights.detach().clone()

    with Learners("all_reduce", 2, start) as group:
        weights = group.run(work)
    alone = make(noise=0.0)
    for k in range(4):
        alone.step(batch(alone, k), 0.0)
    for one in weights:
        torch.testing.assert_close(one, alone.flat.weights.detach(), atol=1e-6, rtol=1e-4)


SETTINGS = {"num_envs": 4, "hidden_sizes": (8, 8), "device": "cpu", "quiet": True, "preset": "none"}


@pytest.mark.parametrize(
    "settings",
    [
        {"topology": "actor_learner", "runtime": "inline", "actors": 2},
        {"topology": "data_parallel", "runtime": "inline", "actors": 2},
        {"topology": "data_parallel", "runtime": "inline", "actors": 2, "compress": "topk:0.3"},
        {"topology": "data_parallel", "runtime": "inline", "actors": 2, "exchange": "param_server", "mode": "async"},
        {
            "topology": "data_parallel",
            "runtime": "inline",
            "actors": 2,
            "exchange": "param_server",
            "backup_workers": 1,
        },
        {"topology": "data_parallel", "runtime": "inline", "actors": 2, "exchange": "gossip"},
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values()),
)
def test_groups_train_and_resume_in_every_topology(settings, tmp_path):
    result = corral.train(ALGO, "CartPole-v1", 1024, 1, tmp_path / "run", **SETTINGS, **settings)
    assert result.version > 4
    more = corral.resume(tmp_path / "run", steps=1536, quiet=True)
    assert more.version > result.version


def test_groups_resume_bit_for_bit_in_sync(tmp_path):
    settings = SETTINGS | {"backend": "local", "anneal": False}
    corral.train(ALGO, "CartPole-v1", 640, 1, tmp_path / "whole", **settings)
    corral.train(ALGO, "CartPole-v1", 320, 1, tmp_path / "parts", **settings)
    corral.resume(tmp_path / "parts", steps=640, quiet=True)
    whole, parts = (corral.load_policy(tmp_path / name, "latest").model.state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_learning_rates_are_metrics_by_group():
    trainer = learn(ALGO, "CartPole-v1", 200, hidden_sizes=(8, 8))
    assert {"learn/lr_critic", "learn/lr_actor"} <= trainer.metrics().keys()
