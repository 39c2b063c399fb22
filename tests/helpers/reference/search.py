"""Search as one would write it from the paper: objects, recursion, one simulation at a time."""

import math

import numpy as np

TINY = 1e-38


class Node:
    def __init__(self, board, to_play, priors, value, over=False):
        self.board, self.to_play, self.value, self.over = board, to_play, value, over
        self.priors = priors  # action -> prior
        self.children, self.rewards = {}, {}
        self.n, self.w = dict.fromkeys(priors, 0), dict.fromkeys(priors, 0.0)
        self.visits = 1

    def q(self, action):
        return self.w[action] / self.n[action]


class Tree:
    """`step(board, action) -> (board, reward, over)`; the other moves next. `evaluate(board) -> (priors, value)`."""

    def __init__(self, board, to_play, step, evaluate, discount=1.0):
        self.step, self.evaluate, self.discount = step, evaluate, discount
        self.root = Node(board, to_play, *evaluate(board))
        self.low = self.high = self.root.value

    def simulate(self, choose):
        """One simulation; `choose(tree, node) -> action`."""
        path, node = [], self.root
        while not node.over:
            action = choose(self, node)
            path.append((node, action))
            if action not in node.children:
                board, reward, over = self.step(node.board, action)
                priors, value = ({}, 0.0) if over else self.evaluate(board)
                node.children[action] = Node(board, 1 - node.to_play, priors, value, over)
                node.rewards[action] = reward
                node = node.children[action]
                break
            node = node.children[action]
            if node.over:
                node.visits += 1
        result = node.value
        below = node
        for above, action in reversed(path):
            if above.to_play != below.to_play:
                result = -result
            result = above.rewards[action] + self.discount * result
            above.n[action] += 1
            above.w[action] += result
            above.visits += 1
            self.low, self.high = min(self.low, result), max(self.high, result)
            below = above


class ChanceTree(Tree):
    """`step(place, action) -> (place, shown, reward, over)` throws dice, and `evaluate(shown)` sees only what is shown.

    An action leads to several outcomes, told apart by what is shown of them. One that is drawn again is at the place
    that was drawn last (`newest`), or stays at the first one.
    """

    def __init__(self, place, shown, step, evaluate, discount=1.0, k=1.0, alpha=0.5, newest=True):
        self.step, self.evaluate, self.discount, self.k, self.alpha, self.newest = (
            step, evaluate, discount, k, alpha, newest
        )  # fmt: skip
        self.root = Node(place, 0, *evaluate(shown))
        self.low = self.high = self.root.value
        self.redraws = self.repeats = 0

    def simulate(self, choose):
        """One simulation; False if it ended without a result, because it drew what is known."""
        path, node = [], self.root
        while not node.over:
            action = choose(self, node)
            path.append((node, action))
            outcomes = node.children.setdefault(action, [])  # the newest first
            below = self.follow(node, action, outcomes)
            if below is None:
                node = self.draw(node, action, outcomes)
                if node is None:
                    return False
                break
            node = below
            node.visits += node.over
        result = node.value
        for (above, action), below in zip(reversed(path), reversed([*(n for n, _ in path[1:]), node]), strict=True):
            result = below.reward + self.discount * result
            above.n[action] += 1
            above.w[action] += result
            above.visits += 1
            self.low, self.high = min(self.low, result), max(self.high, result)
        return True

    def follow(self, node, action, outcomes):
        """Another draw, or the outcome that is furthest behind its share of the draws."""
        if not outcomes:
            return None
        best = min(outcomes, key=lambda one: (one.visits + 0.5) / one.draws)
        if (best.visits + 0.5) / best.draws < 1:
            return best
        drawn = sum(one.draws for one in outcomes)
        redraws, repeats = self.redraws - (drawn - 1), self.repeats - (drawn - len(outcomes))
        few = redraws > 0 and 4 * repeats >= redraws
        return None if few or drawn < self.k * node.n[action] ** self.alpha else best

    def draw(self, node, action, outcomes):
        place, shown, reward, over = self.step(node.board, action)
        self.redraws += bool(outcomes)
        for known in outcomes:
            if known.mark == (shown, reward, over):
                self.repeats += 1
                known.draws += 1
                if self.newest:
                    known.board = place
                known.visits += known.over
                return known if known.over else None
        made = Node(place, 0, *(({}, 0.0) if over else self.evaluate(shown)), over)
        made.mark, made.reward, made.draws = (shown, reward, over), reward, 1
        outcomes.insert(0, made)
        return made


def puct(c_init=1.25, c_base=19652.0):
    def choose(tree, node):
        explore = (c_init + math.log((node.visits + c_base + 1) / c_base)) * math.sqrt(node.visits)
        unknown = (node.value + sum(node.w.values())) / node.visits
        span = tree.high - tree.low

        def score(action):
            q = node.q(action) if node.n[action] else unknown
            q = (q - tree.low) / span if span > 0 else q
            return q + explore * node.priors[action] / (1 + node.n[action])

        return max(sorted(node.priors), key=score)

    return choose


def completed_q(node):
    """Danihelka et al. 2022, equation 33 for the mixed value."""
    seen = [a for a in node.priors if node.n[a]]
    total = sum(node.n.values())
    mixed = node.value
    if seen:
        weight = {a: max(node.priors[a], TINY) for a in seen}
        mean = sum(weight[a] * node.q(a) for a in seen) / sum(weight.values())
        mixed = (node.value + total * mean) / (1 + total)
    return {a: node.q(a) if node.n[a] else mixed for a in node.priors}


def improved_logits(node, c_visit, c_scale):
    """log prior + sigma(completed q), equation 8, with q between 0 and 1 as the authors' own code has it."""
    q = completed_q(node)
    low, high = min(q.values()), max(q.values())
    scale = (c_visit + max(node.n.values())) * c_scale
    return {a: math.log(max(node.priors[a], TINY)) + scale * (q[a] - low) / max(high - low, 1e-8) for a in q}


def softmax(logits):
    top = max(logits.values())
    weights = {a: math.exp(x - top) for a, x in logits.items()}
    return {a: w / sum(weights.values()) for a, w in weights.items()}


def gumbel(noise, order, c_visit=50.0, c_scale=0.1):
    def choose(tree, node):
        logits = improved_logits(node, c_visit, c_scale)
        total = sum(node.n.values())
        if node is tree.root:
            due = [a for a in sorted(node.priors) if node.n[a] == order[total]]
            return max(due, key=lambda a: noise[a] + logits[a])
        policy = softmax(logits)
        return max(sorted(node.priors), key=lambda a: policy[a] - node.n[a] / (1 + total))

    return choose


def gumbel_value(node, c_visit=50.0, c_scale=0.1):
    """What the improved policy expects of the completed q, for who moves."""
    q, policy = completed_q(node), softmax(improved_logits(node, c_visit, c_scale))
    return sum(policy[a] * q[a] for a in q)


def counts(tree, width):
    return np.array([tree.root.n.get(a, 0) for a in range(width)])
