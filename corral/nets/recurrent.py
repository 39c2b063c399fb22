"""Recurrent cores: LSTM and GRU, reset at the start of each episode."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Core(nn.Module):
    """A recurrent cell over `[T, B]`, whose state is set to zero before every row that is `first`.

    The state is one tensor `[B, state_size]`, for an LSTM hidden and cell state concatenated. One step and many use the
    same code, so an unroll equals acting step by step.
    """

    def __init__(self, kind: str, inputs: int, size: int):
        super().__init__()
        self.kind, self.size = kind, size
        self.state_size = 2 * size if kind == "lstm" else size
        gates = 4 if kind == "lstm" else 3
        self.inputs = nn.Linear(inputs, gates * size)
        self.hidden = nn.Linear(size, gates * size)
        for layer in (self.inputs, self.hidden):
            nn.init.orthogonal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def initial_state(self, n: int, device: torch.device | None = None) -> Tensor:
        return torch.zeros(n, self.state_size, device=device)

    def forward(self, x: Tensor, state: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Features `[T, B, inputs]` to outputs `[T, B, size]` and the states after each row, `[T, B, state_size]`."""
        projected = self.inputs(x)
        keep = (~first).to(projected.dtype).unsqueeze(-1)
        outputs, states = [], []
        step = self._lstm if self.kind == "lstm" else self._gru
        for t in range(x.shape[0]):
            state = step(projected[t], state * keep[t])
            outputs.append(state[:, : self.size])
            states.append(state)
        return torch.stack(outputs), torch.stack(states)

    def _lstm(self, projected: Tensor, state: Tensor) -> Tensor:
        hidden, cell = state.chunk(2, -1)
        i, f, g, o = (projected + self.hidden(hidden)).chunk(4, -1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        return torch.cat([torch.sigmoid(o) * torch.tanh(cell), cell], -1)

    def _gru(self, projected: Tensor, state: Tensor) -> Tensor:
        r_in, z_in, n_in = projected.chunk(3, -1)
        r_hid, z_hid, n_hid = self.hidden(state).chunk(3, -1)
        reset, update = torch.sigmoid(r_in + r_hid), torch.sigmoid(z_in + z_hid)
        new = torch.tanh(n_in + reset * n_hid)
        return (1 - update) * new + update * state
