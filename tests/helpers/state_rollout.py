"""A ROLLOUT as a single request to one simulator; planners send theirs by `LinkStates`."""

import numpy as np

from corral.link import protocol as clp
from corral.link.client.states import RowChunk, StateReplies, ask, read_rollout, u8


def rollout(states, parents, actions, steps):
    """Step `steps` times from each state, actions [B * steps, ...]; returns rewards, lengths and last rows."""
    batch, replies = len(parents), StateReplies(states.session.simulator, len(parents))
    rewards, lengths = np.zeros((batch, steps)), np.zeros(batch, np.uint32)

    def take(chunk, reply):
        replies.take(chunk, reply, at=2)
        rewards[:], lengths[:] = read_rollout(reply, batch, steps)

    chunk = RowChunk(states.session, slice(None), batch)
    payload = [u8(parents), states._actions(actions, batch * steps)]
    ask(states._fleet, clp.Op.ROLLOUT, [(chunk, payload)], take, 20.0, meta={"steps": steps})
    return rewards, lengths, replies
