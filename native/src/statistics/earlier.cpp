#include "statistics/earlier.h"

#include <cstring>
#include <new>

namespace polyattn {
namespace {

uint64_t mixed(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 29);
}

uint64_t hash_of(uint64_t hash, const void* data, size_t size) {
  const char* bytes = static_cast<const char*>(data);
  for (; size >= 8; bytes += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, bytes, 8);
    hash = mixed(hash, word);
  }
  uint64_t last = size;
  for (size_t i = 0; i < size; ++i) last = last << 8 | static_cast<unsigned char>(bytes[i]);
  return mixed(hash, last);
}

uint64_t hash_of(int64_t seq) { return mixed(1, static_cast<uint64_t>(seq)); }

}  // namespace

void Chains::add(int32_t entry, uint64_t hash) {
  int32_t& head = heads_[hash % kHeads];
  next_[entry] = head;
  head = entry + 1;
}

void Chains::remove(int32_t entry, uint64_t hash) {
  int32_t* at = &heads_[hash % kHeads];
  while (*at != entry + 1) at = &next_[*at - 1];
  *at = next_[entry];
}

// Pages are cleared by the system as they are used.
Earlier::Earlier() : memory_(static_cast<Memory*>(std::calloc(1, sizeof(Memory)))) {
  if (memory_ == nullptr) throw std::bad_alloc();
}

int64_t Earlier::find(int64_t seq, std::string_view shape, std::string_view dtype, const double* row) {
  Memory& m = *memory_;
  const uint64_t kind = hash_of(hash_of(0, shape.data(), shape.size()), dtype.data(), dtype.size());
  constexpr size_t kBytes = kFields * sizeof(double);
  const uint64_t hash = hash_of(kind, row, kBytes);
  for (int32_t i = m.tensors.begin(hash); i >= 0; i = m.tensors.next(i)) {
    Tensor& known = m.tensor[i];
    if (known.hash != hash || known.kind != kind || std::memcmp(known.row, row, kBytes) != 0) continue;
    take_out(i);
    append(i);
    refer(seq, known.seq);
    return known.seq;
  }
  int32_t entry = m.known;
  if (entry < kEntries) {
    ++m.known;
  } else {
    entry = m.oldest;
    take_out(entry);
    m.tensors.remove(entry, m.tensor[entry].hash);
  }
  Tensor& made = m.tensor[entry];
  made.kind = kind;
  made.hash = hash;
  made.seq = seq;
  std::memcpy(made.row, row, kBytes);
  m.tensors.add(entry, hash);
  append(entry);
  return -1;
}

int64_t Earlier::first(int64_t seq) const {
  const int32_t place = place_of(seq);
  return place < 0 ? seq : memory_->reference[place].first;
}

int32_t Earlier::place_of(int64_t seq) const {
  int32_t i = memory_->references.begin(hash_of(seq));
  while (i >= 0 && memory_->reference[i].seq != seq) i = memory_->references.next(i);
  return i;
}

void Earlier::refer(int64_t seq, int64_t first) {
  Memory& m = *memory_;
  const int32_t known = place_of(seq);
  if (known >= 0) {
    m.reference[known].first = first;
    return;
  }
  const int32_t place = static_cast<int32_t>(m.referred++ % kEntries);
  Reference& reference = m.reference[place];
  if (m.referred > kEntries) m.references.remove(place, hash_of(reference.seq));
  reference = {seq, first};
  m.references.add(place, hash_of(seq));
}

void Earlier::take_out(int32_t entry) {
  Memory& m = *memory_;
  const Tensor& t = m.tensor[entry];
  (t.older < 0 ? m.oldest : m.tensor[t.older].newer) = t.newer;
  (t.newer < 0 ? m.newest : m.tensor[t.newer].older) = t.older;
}

void Earlier::append(int32_t entry) {
  Memory& m = *memory_;
  const bool alone = m.known == 1;
  m.tensor[entry].older = alone ? -1 : m.newest;
  m.tensor[entry].newer = -1;
  (alone ? m.oldest : m.tensor[m.newest].newer) = entry;
  m.newest = entry;
}

}  // namespace polyattn
