"""UCT with random games as the textbook has it, node by node, with boards as lists."""

import math

MASK = 2**64 - 1


class Dice:
    """SplitMix64, in Python's own integers; 31 bits at a time."""

    def __init__(self, seed):
        self.state = seed

    def draw(self):
        self.state = self.state + 0x9E3779B97F4A7C15 & MASK
        x = self.state
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
        return (x ^ x >> 31) >> 33

    def pick(self, options):
        return options[self.draw() * len(options) >> 31]


def place(kind, board, action, player):
    """The board, a tuple of 0, 1 and 2, after a move."""
    board = list(board)
    if kind == "connect4":
        action = next(7 * row + action for row in range(6) if not board[7 * row + action])
    board[action] = player
    return tuple(board)


def legal(kind, board):
    return [a for a in range(7) if not board[35 + a]] if kind == "connect4" else [a for a in range(9) if not board[a]]


def has_won(kind, board, player):
    rows, columns, length = (6, 7, 4) if kind == "connect4" else (3, 3, 3)
    own = {(k // columns, k % columns) for k, owner in enumerate(board) if owner == player}
    return any(
        all((r + k * dr, c + k * dc) in own for k in range(length))
        for r in range(rows) for c in range(columns) for dr, dc in ((0, 1), (1, 0), (1, 1), (1, -1))
    )  # fmt: skip


class Node:
    def __init__(self, kind, board, player, mover_won):
        self.kind, self.board, self.player = kind, board, player
        self.mover_won = mover_won
        self.over = mover_won or not legal(kind, board)
        self.children, self.visits, self.total = {}, 0, 0.0  # total is of who moved here

    def child(self, action):
        board = place(self.kind, self.board, action, self.player)
        return Node(self.kind, board, 3 - self.player, has_won(self.kind, board, self.player))


def random_game(node, dice):
    """To who moved last."""
    start = node
    while not node.over:
        node = node.child(dice.pick(legal(node.kind, node.board)))
    if not node.mover_won:
        return 0.0
    return 1.0 if node.player == start.player else -1.0


def uct(kind, moves, sims, c, seed):
    """Visits of every action after these moves."""
    board, player = (0,) * (42 if kind == "connect4" else 9), 1
    for move in moves:
        board, player = place(kind, board, move, player), 3 - player
    root, dice = Node(kind, board, player, False), Dice(seed)
    for _ in range(sims):
        path = [root]
        while not path[-1].over:
            node = path[-1]
            new = [a for a in legal(kind, node.board) if a not in node.children]
            if new:
                node.children[new[0]] = node.child(new[0])
                path.append(node.children[new[0]])
                break
            log = math.log(node.visits)
            path.append(max(node.children.values(), key=lambda n: n.total / n.visits + c * math.sqrt(log / n.visits)))
        result = random_game(path[-1], dice)
        for node in reversed(path):
            node.visits += 1
            node.total += result
            result = -result
    return [root.children[a].visits if a in root.children else 0 for a in range(7 if kind == "connect4" else 9)]
