// Strips of an item that take turns in the forward pass: while the vector unit computes the exponentials of
// one, the matrix unit multiplies the scores of the next.
//
// A processor looks some hundred instructions ahead, so the two have to be mixed that finely: before the
// exponentials of a row the next two by two tiles of scores are issued, as many of them as keep both in step.
// Nothing is summed in another order than strip after strip, so the results have the same bits.
#pragma once

#include "kernel/forward_strip.h"

namespace polyattn::POLYATTN_NAMESPACE {

template <class S, class U, class C>
class ScoresAhead {
 public:
  ScoresAhead(const ForwardStrip<S, U, C>& strip, const Workspace& w, const Item& item, bool careful)
      : strip_(strip), item_(item), careful_(careful), turns_{Turn(w.of_turn(0)), Turn(w.of_turn(1))} {}
  ScoresAhead(const ScoresAhead&) = delete;

  // Where the words of the strip go that comes next.
  uint64_t* words() const { return turns_[1 - now_].w.words; }

  // The next strip, whose keys and values are packed, and the end of the one before.
  void next(int index, const Visit& visit) {
    Turn& turn = turns_[1 - now_];
    turn.index = index;
    turn.visit = visit;
    turn.done = 0;
    strip_.clear(turn.tops);
    if (turns_[now_].index < 0) {
      score(turn, kAll);
    } else {
      end(turns_[now_],
          [this, &turn, rows = rows_of(turns_[now_])](int r) { score(turn, parts(turn) * (r + 1) / rows); });
    }
    now_ = 1 - now_;
  }

  // The end of the last one.
  void last() {
    if (turns_[now_].index >= 0) end(turns_[now_], NothingElse());
  }

 private:
  static constexpr int kAll = kChunk * ForwardStrip<S, U, C>::kParts;

  struct Turn {
    explicit Turn(const Workspace& memory) : w(memory) {}
    Workspace w;
    int index = -1, done = 0;  // parts of scores that are there
    Visit visit;
    alignas(64) float tops[kRows * S::kLanes];
  };

  static int parts(const Turn& turn) { return turn.visit.tiles * ForwardStrip<S, U, C>::kParts; }
  static int rows_of(const Turn& turn) { return turn.w.strips[turn.index].count; }

  void score(Turn& turn, int wanted) const {
    constexpr int kParts = ForwardStrip<S, U, C>::kParts;
    for (wanted = smaller(wanted, parts(turn)); turn.done < wanted; ++turn.done) {
      strip_.score_part(turn.w, item_, turn.index, turn.visit, turn.done / kParts, turn.done % kParts,
                        turn.tops);
    }
  }

  template <class Meanwhile>
  void end(Turn& turn, Meanwhile meanwhile) {
    strip_.attend(turn.w, item_, turn.index, turn.visit, careful_, turn.tops, meanwhile);
    turn.index = -1;
  }

  const ForwardStrip<S, U, C>& strip_;
  const Item& item_;
  const bool careful_;
  Turn turns_[2];
  int now_ = 0;
};

}  // namespace polyattn::POLYATTN_NAMESPACE
