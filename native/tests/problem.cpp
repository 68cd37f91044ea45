#include "problem.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

#include "quantised.h"
#include "random_mask.h"

namespace polyattn::testing {
namespace {

class Maker {
 public:
  Maker(uint64_t seed, bool backward)
      : random_(seed), backward_(backward), made_(new Problem), a_(made_->a) {}

  void* allocate(int64_t elements, int64_t width) {
    // Half of the arrays start where malloc puts them, the others at any multiple of an element.
    const int64_t front = random_.chance(0.5) ? 0 : random_.between(0, 40) * width;
    made_->buffers.push_back(
        std::make_unique<Buffer>(static_cast<size_t>(elements * width), static_cast<size_t>(front)));
    return made_->buffers.back()->data();
  }

  auto allocator() {
    return [this](int64_t elements, int64_t width) { return allocate(elements, width); };
  }

  std::unique_ptr<Problem> make() {
    sizes();
    if (packed_) offsets();
    arrays();
    MaskMaker(random_, a_, allocator()).mask(paged_lengths_);
    bias();
    extras();
    if (backward_) gradients();
    give_extents(*made_);
    made_->text = describe(a_) + (huge_ ? " huge" : "");
    return std::move(made_);
  }

 private:
  int64_t* integers(int64_t count) { return static_cast<int64_t*>(allocate(count, 8)); }

  void sizes() {
    static constexpr int64_t heads[] = {1, 3, 7, 8, 16, 32, 40, 64, 64, 64, 72, 100, 128, 256};
    static constexpr int64_t lengths[] = {1, 2, 5, 16, 31, 33, 63, 64, 65, 100, 127, 128, 129, 150};
    static constexpr int64_t groups[] = {1, 1, 2, 3, 4, 8};
    static constexpr DType dtypes[] = {DType::f32, DType::bf16, DType::f16};
    a_.dtype = random_.pick(dtypes);
    a_.batch = random_.chance(0.02) ? 0 : random_.between(1, 3);
    a_.kv_heads = random_.between(1, 2);
    a_.q_heads = a_.kv_heads * random_.pick(groups);
    a_.head_dim = random_.chance(0.9) ? random_.pick(heads) : random_.between(1, 256);
    a_.value_dim = random_.chance(0.7) ? a_.head_dim : random_.pick(heads);
    a_.q_len = random_.pick(lengths);
    a_.kv_len = random_.chance(0.4) ? a_.q_len : random_.pick(lengths);
    if (random_.chance(0.2)) {  // decoding
      a_.q_len = random_.between(1, 4);
      a_.kv_len = random_.between(1, random_.chance(0.2) ? 3000 : 600);
      if (random_.chance(0.4)) {  // heads that are read together, and more than that
        a_.kv_heads = random_.between(3, 20);
        a_.q_heads = a_.kv_heads * random_.pick(groups);
        a_.head_dim = a_.value_dim = random_.between(1, 40);
        if (random_.chance(0.5)) a_.kv_len = random_.between(2048, 2600);  // from where on they are
      }
      if (random_.chance(0.1)) {  // a cache that is long, and not split where there are heads enough
        a_.kv_heads = random_.between(1, 16);
        a_.q_heads = a_.kv_heads * random_.pick(groups);
        a_.head_dim = a_.value_dim = random_.between(1, 10);
        a_.kv_len = random_.between(4096, 20000);
      }
    }
    if (random_.chance(0.04)) {  // many steps over the keys, of few or of many rows
      a_.kv_heads = a_.q_heads = random_.between(1, 2);
      a_.head_dim = a_.value_dim = random_.between(1, 8);
      a_.q_len = random_.between(1, 150);
      a_.kv_len = random_.between(3000, 9000);
    }
    if (random_.chance(0.03)) a_.kv_len = 0;
    if (random_.chance(0.03)) a_.q_len = 0;
    // The oracle is a plain triple loop: keep it to some ten million products.
    while (a_.batch * a_.q_heads * a_.q_len * a_.kv_len * (a_.head_dim + a_.value_dim) > 20000000 &&
           a_.q_heads > a_.kv_heads) {
      a_.q_heads -= a_.kv_heads;
    }
    packed_ = random_.chance(0.2);
    if (!backward_ && !packed_ && random_.chance(0.25)) coded_ = random_.chance(0.6) ? kInt8 : kF8;
    a_.threads = static_cast<int32_t>(random_.between(1, 3));
    a_.scale = static_cast<float>(random_.chance(0.7) ? 1 / std::sqrt(static_cast<double>(a_.head_dim))
                                                      : random_.uniform(-2, 2));
    if (random_.chance(0.25)) a_.softcap = static_cast<float>(random_.uniform(0.5, 50));
    // Products up to 1e30 where the type holds them.
    huge_ = !backward_ && a_.dtype != DType::f16 && random_.chance(0.04);
  }

  const int64_t* cuts(int64_t total) {
    int64_t* offsets = integers(a_.batch + 1);
    for (int64_t b = 0; b <= a_.batch; ++b) offsets[b] = random_.between(0, total);
    std::sort(offsets, offsets + a_.batch + 1);
    offsets[0] = 0;
    offsets[a_.batch] = total;
    return offsets;
  }

  void offsets() {
    if (a_.batch == 0) a_.q_len = a_.kv_len = 0;
    a_.cu_q = cuts(a_.q_len);
    a_.cu_kv = cuts(a_.kv_len);
  }

  // In memory the arrays are (B, N, T, H), (B, T, N, H) or slices of wider ones.
  Tensor tensor(DType dtype, int64_t batch, int64_t heads, int64_t rows, int64_t width, bool shared) {
    Tensor made{{}, dtype, {batch, heads, rows, width}};
    const int64_t gap = random_.chance(0.3) ? random_.between(1, 9) : 0;
    int64_t* const orders[][3] = {{&made.array.row, &made.array.head, &made.array.batch},
                                  {&made.array.head, &made.array.row, &made.array.batch},
                                  {&made.array.batch, &made.array.head, &made.array.row}};
    const int64_t which = random_.chance(0.9) ? random_.between(0, 1) : 2;
    int64_t extent = width + gap;
    for (int64_t* stride : orders[which]) {
      *stride = extent;
      const int64_t size = stride == &made.array.row ? rows : stride == &made.array.head ? heads : batch;
      extent *= std::max<int64_t>(size, 1);
    }
    if (packed_ || (shared && random_.chance(0.1))) made.array.batch = 0;
    int64_t last = 0;
    made.each([&](int64_t index, int64_t) { last = std::max(last, index + 1); });
    made.array.data = allocate(last, size_of(dtype));
    made.buffer = made_->buffers.back().get();
    return made;
  }

  // NaN in the gaps between rows: whoever reads there shows it.
  void fill(Tensor& made, double size) {
    if (made.count() == 0) return;
    int64_t last = 0;
    made.each([&](int64_t index, int64_t) { last = std::max(last, index + 1); });
    for (int64_t i = 0; i < last; ++i) put(made.dtype, made.array.data, i, NAN);
    made.each([&](int64_t index, int64_t) {
      const bool code = is_code(made.dtype);
      const double value = code ? random_code(random_, made.dtype) : random_.uniform(-size, size);
      put(made.dtype, made.array.data, index, value);
    });
  }

  void arrays() {
    const int64_t batch = packed_ ? (a_.batch > 0) : a_.batch;
    const double size = huge_ ? 1e15 : random_.chance(0.1) ? 8 : 1.5;
    int64_t holders = batch, keys = a_.kv_len;
    const bool coded = is_code(coded_);
    if (!packed_ && !backward_ && !coded && random_.chance(0.2)) {
      page_table();
      holders = a_.pages.count;
      keys = a_.pages.page_size;
    }
    made_->q = tensor(a_.dtype, batch, a_.q_heads, a_.q_len, a_.head_dim, true);
    const bool shared = a_.pages.table == nullptr;
    const DType stored = coded ? coded_ : a_.dtype;
    made_->k = tensor(stored, holders, a_.kv_heads, keys, a_.head_dim, shared);
    made_->v = tensor(stored, holders, a_.kv_heads, keys, a_.value_dim, shared);
    made_->out = tensor(a_.dtype, batch, a_.q_heads, a_.q_len, a_.value_dim, false);
    fill(made_->q, size);
    fill(made_->k, size);
    fill(made_->v, 2);
    a_.q = made_->q.array;
    a_.k = made_->k.array;
    a_.v = made_->v.array;
    if (coded) {
      quantise(random_, a_, coded_, size, allocator());
    }
    a_.out = made_->out.array;
    if (backward_ || random_.chance(0.8)) {
      made_->lse = tensor(DType::f32, batch, a_.q_heads, a_.q_len, 1, false);
      a_.lse = made_->lse.array;
    }
  }

  // Pages in random order, some of them shared between sequences, some unused.
  void page_table() {
    static constexpr int64_t sizes[] = {1, 3, 16, 16, 32, 64, 100, 128};
    Pages& pages = a_.pages;
    pages.page_size = random_.pick(sizes);
    const int64_t columns = (a_.kv_len + pages.page_size - 1) / pages.page_size;
    pages.count = std::max<int64_t>(1, a_.batch * columns + random_.between(0, 3));
    pages.row = columns + random_.between(0, 2);
    int64_t* table = integers(std::max<int64_t>(1, (a_.batch - 1) * pages.row + columns));
    for (int64_t b = 0; b < a_.batch; ++b) {
      for (int64_t i = 0; i < columns; ++i) {
        table[b * pages.row + i] = random_.between(0, pages.count - 1);
      }
    }
    pages.table = table;
    if (!random_.chance(0.6)) return;
    // Lengths, and entries that no key below them needs left wild.
    int64_t* const lengths = random_lengths(random_, a_, a_.kv_len, allocator());
    const bool told = random_.chance(0.5);  // of the pages, or of the mask
    for (int64_t b = 0; b < a_.batch; ++b) {
      if (told) lengths[b] = std::clamp<int64_t>(lengths[b], 0, a_.kv_len);
      const int64_t length = std::max<int64_t>(0, lengths[b]);
      for (int64_t i = (length + pages.page_size - 1) / pages.page_size; i < columns; ++i) {
        table[b * pages.row + i] = random_.chance(0.5) ? -1 : std::numeric_limits<int64_t>::max();
      }
    }
    (told ? pages.lengths : paged_lengths_) = lengths;
  }

  void bias() {
    if (!random_.chance(0.3)) return;
    Bias& bias = a_.bias;
    bias.dtype = random_.chance(0.5) ? a_.dtype : DType::f32;
    bias_sizes_[0] = random_.chance(0.2) ? 1 : a_.kv_len;
    bias_sizes_[1] = random_.chance(0.3) ? 1 : a_.q_len;
    bias_sizes_[2] = random_.chance(0.5) ? 1 : a_.q_heads;
    bias_sizes_[3] = random_.chance(0.5) ? 1 : a_.batch;
    int64_t* const strides[] = {&bias.column, &bias.row, &bias.head, &bias.batch};
    const int64_t count = contiguous(bias_sizes_, strides);
    if (random_.chance(0.15) && bias_sizes_[0] > 1 && bias_sizes_[1] > 1) {
      bias.row = 1;
      bias.column = bias_sizes_[1];
    }
    void* data = allocate(count, size_of(bias.dtype));
    const double lowest = bias.dtype == DType::f16 ? -65504 : -static_cast<double>(FLT_MAX);
    const double odd = random_.chance(0.3) ? random_.uniform(0, 0.5) : 0;
    const bool infinite = random_.chance(0.5);
    for (int64_t i = 0; i < count; ++i) {
      put(bias.dtype, data, i, random_.uniform(-2, 2));
      if (random_.chance(odd)) put(bias.dtype, data, i, infinite ? -INFINITY : lowest);
    }
    if (bias.dtype == DType::bf16 && odd > 0 && !infinite) {
      // -FLT_MAX rounds to -inf in bfloat16: its own lowest number instead.
      for (int64_t i = 0; i < count; ++i) {
        if (get(bias.dtype, data, i) < -1e30) static_cast<uint16_t*>(data)[i] = 0xff7f;
      }
    }
    bias.data = data;
  }

  void extras() {
    if (random_.chance(0.15)) {
      a_.slopes.head = random_.chance(0.8);
      a_.slopes.batch = random_.chance(0.3) ? (a_.slopes.head != 0 ? a_.q_heads : 1) : 0;
      const int64_t heads = a_.slopes.head != 0 ? a_.q_heads : 1;
      const int64_t count = heads * (a_.slopes.batch != 0 ? a_.batch : 1);
      float* slopes = static_cast<float*>(allocate(count, 4));
      for (int64_t i = 0; i < count; ++i) slopes[i] = static_cast<float>(random_.uniform(0, 0.7));
      a_.slopes.data = slopes;
    }
    if (random_.chance(0.2)) {
      a_.sink_count = random_.between(1, 3);
      const int64_t count = a_.sink_count * a_.q_heads;
      float* sinks = static_cast<float*>(allocate(count, 4));
      for (int64_t i = 0; i < count; ++i) {
        sinks[i] = static_cast<float>(random_.chance(0.1) ? -INFINITY : random_.uniform(-4, 4));
      }
      a_.sinks = sinks;
    }
  }

  void gradients() {
    Problem& p = *made_;
    const int64_t batch = packed_ ? (a_.batch > 0) : a_.batch;
    p.dout = tensor(a_.dtype, batch, a_.q_heads, a_.q_len, a_.value_dim, true);
    fill(p.dout, 1);
    p.delta = tensor(DType::f32, batch, a_.q_heads, a_.q_len, 1, false);
    p.dq = tensor(a_.dtype, batch, a_.q_heads, a_.q_len, a_.head_dim, false);
    p.dk = tensor(a_.dtype, batch, a_.kv_heads, a_.kv_len, a_.head_dim, false);
    p.dv = tensor(a_.dtype, batch, a_.kv_heads, a_.kv_len, a_.value_dim, false);
    a_.dout = p.dout.array;
    a_.delta = p.delta.array;
    a_.dq = p.dq.array;
    a_.dk = p.dk.array;
    a_.dv = p.dv.array;
    if (a_.bias.data == nullptr || !random_.chance(0.7)) return;
    int64_t* const strides[] = {&a_.dbias_column, &a_.dbias_row, &a_.dbias_head, &a_.dbias_batch};
    const int64_t count = contiguous(bias_sizes_, strides);
    p.dbias.dtype = DType::f32;
    p.dbias.array.data = allocate(count, 4);
    p.dbias.array.batch = a_.dbias_batch;
    p.dbias.array.head = a_.dbias_head;
    p.dbias.array.row = a_.dbias_row;
    p.dbias.buffer = p.buffers.back().get();
    for (int i = 0; i < 4; ++i) p.dbias.sizes[i] = bias_sizes_[3 - i];
    a_.dbias = static_cast<float*>(p.dbias.array.data);
  }

  Random random_;
  bool backward_, packed_ = false, huge_ = false;
  DType coded_ = DType::f32;  // of keys and values, where it is a code's
  std::unique_ptr<Problem> made_;
  Arguments& a_;
  const int64_t* paged_lengths_ = nullptr;
  int64_t bias_sizes_[4] = {};  // column, row, head, batch
};

}  // namespace

std::vector<Tensor*> Problem::written(Pass pass) {
  std::vector<Tensor*> all{&out, &lse};
  if (pass == Pass::backward) all = {&dq, &dk, &dv, &dbias};
  std::erase_if(all, [](const Tensor* tensor) { return tensor->buffer == nullptr; });
  return all;
}

void Problem::reset(Pass pass) {
  for (Tensor* tensor : written(pass)) const_cast<Buffer*>(tensor->buffer)->reset();
}

std::unique_ptr<Problem> random_problem(uint64_t seed, bool backward) { return Maker(seed, backward).make(); }

}  // namespace polyattn::testing
