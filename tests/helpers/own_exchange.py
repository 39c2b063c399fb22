"""An exchange of a user's own: local SGD, which averages weights every few updates instead of gradients."""

from corral.learn.exchange.all_reduce import AllReduce


class LocalSgd(AllReduce):
    """Every worker applies its own gradients; after `period` updates all take the mean of their weights."""

    period = 4

    def grads(self, grad, rows, lr, *, group=0, stop=False, last=False):
        return "stop" if stop else "apply"

    def params(self, weights):
        self._updates += 1
        if self._size > 1 and self._updates % self.period == 0:
            mean = weights.clone()
            self._reduce(mean)
            weights.copy_(mean / self._size)
