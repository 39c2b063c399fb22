// Connect Four: two players who move in turn, and a mask of legal actions.
#include "corral.hpp"

struct ConnectFour {
  int8_t board[6][7] = {};  // 0 free, 1 and 2 the players' stones; row 0 is at the bottom
  int moves = 0;

  static corral::Spec spec() {
    corral::Spec s("ConnectFour", 1);
    s.obs.box("stones", corral::U8, {2, 6, 7}, 0, 1)  // of who moves next, then of the other
        .box("action_mask", corral::U8, {7}, 0, 1);
    s.act.discrete("column", 7);
    s.players = 2;
    s.rng_in_state = true;  // there are none
    return s;
  }
  void reset(uint64_t, corral::Out& o) {
    *this = ConnectFour();
    observe(o);
  }
  void step(const corral::In& a, corral::Out& o) {
    int64_t column = a.i("column");
    int mover = moves % 2, row = 0;
    while (row < 6 && board[row][column]) ++row;
    if (row == 6) {  // who does what the mask forbids has lost
      o.terminated = true;
      o.rewards[mover] = -1, o.rewards[1 - mover] = 1;
    } else {
      board[row][column] = static_cast<int8_t>(mover + 1);
      ++moves;
      if (wins(row, static_cast<int>(column))) o.terminated = true, o.rewards[mover] = 1, o.rewards[1 - mover] = -1;
      if (moves == 42) o.terminated = true;
    }
    observe(o);
  }
  bool wins(int row, int column) const {
    for (auto [dr, dc] : {std::pair(0, 1), {1, 0}, {1, 1}, {1, -1}})
      if (1 + line(row, column, dr, dc) + line(row, column, -dr, -dc) >= 4) return true;
    return false;
  }
  int line(int row, int column, int dr, int dc) const {
    int8_t mine = board[row][column];
    int n = 0;
    for (row += dr, column += dc; row >= 0 && row < 6 && column >= 0 && column < 7 && board[row][column] == mine; row += dr, column += dc) ++n;
    return n;
  }
  void observe(corral::Out& o) const {
    uint8_t *stones = o.u8("stones"), *mask = o.u8("action_mask");
    int8_t mine = static_cast<int8_t>(moves % 2 + 1);
    for (int i = 0; i < 42; ++i) {
      int8_t stone = board[i / 7][i % 7];
      stones[i] = stone == mine, stones[42 + i] = stone && stone != mine;
    }
    for (int c = 0; c < 7; ++c) mask[c] = board[5][c] == 0;
    o.to_play = moves % 2;
  }
};

int main(int argc, char** argv) { return corral::serve<ConnectFour>(argc, argv); }
