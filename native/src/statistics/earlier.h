// Which line was the first to have the numbers that a line has.
//
// Its memory is taken once and in one piece. Small pieces that outlive a forward, taken while the
// model takes and frees large ones, break the heap up: the next tensor of the same size no longer
// fits, and the process grows with every forward, by pages that the system has to clear.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string_view>

#include "statistics/statistics.h"

namespace polyattn {

// Numbers 0 .. kEntries - 1 by hash, each in one chain at most.
class Chains {
 public:
  static constexpr int32_t kEntries = kRemembered;

  void add(int32_t entry, uint64_t hash);
  void remove(int32_t entry, uint64_t hash);
  int32_t begin(uint64_t hash) const { return heads_[hash % kHeads] - 1; }
  int32_t next(int32_t entry) const { return next_[entry] - 1; }

 private:
  static constexpr uint64_t kHeads = 2 * kEntries;

  int32_t heads_[kHeads], next_[kEntries];  // entry + 1; 0 ends a chain
};

class Earlier {
 public:
  Earlier();

  // The seq of an earlier line with the same shape, dtype and numbers, or -1; then `seq` is the
  // first to have them. The latest kEntries tensors are remembered, of the rest those asked for last.
  int64_t find(int64_t seq, std::string_view shape, std::string_view dtype, const double* row);

  // The line that has the numbers that line `seq` refers to; the latest kEntries are known.
  int64_t first(int64_t seq) const;

 private:
  static constexpr int32_t kEntries = Chains::kEntries;

  struct Tensor {
    uint64_t kind, hash;  // of shape and dtype, which is not compared otherwise, and of all
    int64_t seq;
    int32_t older, newer;
    double row[kFields];
  };
  struct Reference {
    int64_t seq, first;
  };
  // All zero at first.
  struct Memory {
    Chains tensors, references;
    int32_t known, oldest, newest;
    int64_t referred;
    Reference reference[kEntries];
    Tensor tensor[kEntries];
  };
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  int32_t place_of(int64_t seq) const;
  void refer(int64_t seq, int64_t first);
  void take_out(int32_t entry);
  void append(int32_t entry);

  std::unique_ptr<Memory, Free> memory_;
};

}  // namespace polyattn
