#include "works.h"

#include <cstdio>
#include <cstring>
#include <new>

#include "pack.h"
#include "repack.h"

namespace stress {

using namespace ktg;

uint64_t Random::bits() {  // splitmix64
  uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

float Random::normal() {
  float sum = 0;
  const uint64_t b = bits();
  for (int i = 0; i < 4; ++i) sum += float(b >> (16 * i) & 0xFFFF) / 65536.0f - 0.5f;
  return 1.5f * sum;
}

namespace {

// Every packed format, with the groups and the forms of rows it allows. A new format is a row here.
struct FormatRow {
  const char* name;
  std::vector<long> groups;
  std::vector<const char*> activations;
};
const FormatRow kFormats[] = {
    {"f32", {0}, {"f32"}},
    {"bf16", {0}, {"f32", "bf16"}},
    {"int8", {0}, {"f32", "int8"}},
    {"int4", {32, 64, 128}, {"f32", "int8"}},
    {"int4p", {32, 64, 128}, {"int8"}},
    {"int8", {32, 64, 128}, {"f32", "int8"}},
    {"int4z", {32, 64, 128}, {"f32", "int8"}},
    {"mxfp4", {32}, {"f32", "int8"}},
    {"f16", {0}, {"f32"}},
    {"fp8", {128}, {"f32", "bf16"}},
    {"q4_0", {0}, {"int8"}},
    {"q8_0", {0}, {"int8"}},
    {"q4_k", {0}, {"int8"}},
    {"q5_k", {0}, {"int8"}},
    {"q6_k", {0}, {"int8"}},
    {"iq4_xs", {0}, {"int8"}},
};

// Any bits make a GGUF block, except that its f16 scales are finite: here between 2^-9 and 2^-6.
std::vector<uint8_t> random_blocks(Random& r, const FileBlock& b, long rows, long cols) {
  std::vector<uint8_t> bytes(size_t(rows * (cols / b.columns) * b.bytes));
  for (uint8_t& v : bytes) v = uint8_t(r.bits());
  for (size_t at = 0; at < bytes.size(); at += size_t(b.bytes))
    for (long scale : b.scales)
      if (scale >= 0) bytes[at + size_t(scale) + 1] = uint8_t(0x18 + r.below(12));
  return bytes;
}

class Builder {
 public:
  Builder(Work& work, Random& random, const IsaTable& isa) : w(work), r(random), isa_(isa) {}

  // Tensors have the shape [T, ...] with a first size of -1, unless `fixed`.
  Operand input(std::vector<long> shape, bool fixed = false, int dtype = -1) {
    if (dtype < 0) dtype = dtype_;
    const long count = elements(shape);
    char* data = memory(size_t(count) * (dtype == DT_BF16 ? 2 : 4));
    for (long i = 0; i < count; ++i) put(data, dtype, i, r.normal());
    return tensor(data, dtype, shape, fixed);
  }
  Operand output(std::vector<long> shape, int dtype = -1) {
    if (dtype < 0) dtype = dtype_;
    const size_t bytes = size_t(elements(shape)) * (dtype == DT_BF16 ? 2 : 4);
    char* data = memory(bytes);
    w.outputs.push_back({data, bytes});
    return tensor(data, dtype, shape, false);
  }
  Operand ids(long k, long below, bool some_absent) {
    char* data = memory(size_t(w.tokens * k) * 4);
    for (long i = 0; i < w.tokens * k; ++i) {
      const int id = some_absent && r.below(5) == 0 ? -1 : int(r.below(below));
      std::memcpy(data + i * 4, &id, 4);
    }
    return tensor(data, DT_I32, {w.tokens, k}, false);
  }
  // A weight for a kernel that takes f32 rows only.
  Operand plain_weight(long rows, long cols) {
    const bool fits = std::string(activations_) == "f32";
    return fits ? weight(rows, cols) : weight_of("f32", 0, "f32", rows, cols, 1, false);
  }
  Operand weight(long rows, long cols, long count = 1, bool gate_up = false) {
    return weight_of(format_->name, group_, activations_, rows, cols, count, gate_up);
  }
  Operand weight_of(const char* format, long group, const char* activations, long rows, long cols,
                    long count, bool gate_up) {
    Operand o{};
    o.kind = KIND_WEIGHT;
    const char* error = describe_weight(format, rows, cols, count, group, gate_up, &o.w);
    if (!error) error = set_activations(activations, &o.w);
    if (error) {
      std::fprintf(stderr, "stress: a row of kFormats is wrong: %s: %s\n", format, error);
      std::exit(2);
    }
    o.w.many_rows = r.below(2) ? 0 : r.between(1, 20);
    char* stack = memory(size_t(o.w.stride * count));
    o.w.data = stack;
    for (long m = 0; m < count && from_gguf(o.w.format); ++m) {
      const FileBlock& b = file_block(o.w.format);
      const std::vector<uint8_t> blocks = random_blocks(r, b, rows, cols);
      repack_matrix(o.w, stack, m, {blocks.data(), rows, cols / b.columns * b.bytes});
    }
    if (from_gguf(o.w.format)) return o;
    std::vector<float> dense(size_t(rows * cols));
    for (long m = 0; m < count; ++m) {
      for (float& v : dense) v = r.normal() / 8;
      const char* source = reinterpret_cast<const char*>(dense.data());
      pack_matrix(isa_, o.w, stack, m, {source, DT_F32, rows, cols, cols});
    }
    return o;
  }
  Operand state(std::vector<long> widths, long pages, long page_size) {
    Operand o{};
    o.kind = KIND_STATE;
    o.s.dtype = dtype_, o.s.parts = int(widths.size());
    o.s.layers = 2, o.s.pages = pages, o.s.page_size = page_size;
    for (size_t p = 0; p < widths.size(); ++p) {
      const long count = 2 * pages * page_size * widths[p];
      o.s.row[p] = widths[p];
      o.s.data[p] = memory(size_t(count) * (dtype_ == DT_BF16 ? 2 : 4));
      for (long i = 0; i < count; ++i) put(o.s.data[p], dtype_, i, r.normal());
    }
    return o;
  }
  static Operand none() { return {}; }
  static Operand batch() {
    Operand o{};
    o.kind = KIND_BATCH;
    return o;
  }
  void step(const char* kernel, std::vector<Operand> operands,
            std::map<std::string, AttrValue> attrs = {}) {
    w.steps.push_back({kernel, std::move(operands), std::move(attrs)});
  }
  template <class T>
  const T* ints(const std::vector<T>& values) {
    char* data = memory(values.size() * sizeof(T));
    if (!values.empty()) std::memcpy(data, values.data(), values.size() * sizeof(T));
    return reinterpret_cast<const T*>(data);
  }
  void choose_format() {
    format_ = &kFormats[r.below(long(sizeof kFormats / sizeof *kFormats))];
    group_ = format_->groups[r.below(long(format_->groups.size()))];
    activations_ = format_->activations[r.below(long(format_->activations.size()))];
    dtype_ = r.below(2) ? DT_F32 : DT_BF16;
  }
  std::string format() const { return format_->name; }
  // A number of columns: whole blocks where the format has them.
  long columns(long low, long high) {
    const long n = r.between(low, high), block = block_columns();
    return (n + block - 1) / block * block;
  }

  Work& w;
  Random& r;

 private:
  char* memory(size_t bytes) {
    void* p = nullptr;
    if (posix_memalign(&p, 64, bytes ? bytes : 1)) throw std::bad_alloc();
    w.memory.emplace_back(static_cast<char*>(p), std::free);
    return w.memory.back().get();
  }
  static long elements(const std::vector<long>& shape) {
    long n = 1;
    for (long d : shape) n *= d;
    return n;
  }
  long block_columns() const {
    WeightArg w{};
    describe_weight(format_->name, 2, kActBlock, 1, group_, false, &w);
    return from_gguf(w.format) ? file_block(w.format).columns : 1;
  }
  static void put(char* data, int dtype, long i, float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    const uint16_t high = uint16_t(bits >> 16);
    dtype == DT_BF16 ? std::memcpy(data + 2 * i, &high, 2) : std::memcpy(data + 4 * i, &v, 4);
  }
  static Operand tensor(char* data, int dtype, const std::vector<long>& shape, bool fixed) {
    Operand o{};
    o.kind = KIND_TENSOR;
    o.t.data = data, o.t.dtype = dtype, o.t.rank = int(shape.size());
    long stride = 1;
    for (int i = o.t.rank - 1; i >= 0; --i) {
      o.t.dim[i] = shape[i];
      if (i < 2) o.t.stride[i] = stride;
      stride *= shape[i];
    }
    if (!fixed) o.t.dim[0] = kAxisTokens;
    return o;
  }

  const IsaTable& isa_;
  const FormatRow* format_ = nullptr;
  const char* activations_ = "f32";
  long group_ = 0;
  int dtype_ = DT_F32;
};

void linear(Builder& b) {
  const long k = b.columns(17, 300), n = b.r.between(17, 200), t = b.w.tokens;
  const Operand bias = b.r.below(2) ? b.input({n}, true, DT_F32) : Builder::none();
  b.step("cpu.linear", {b.input({t, k}), b.weight(n, k), bias, b.output({t, n})});
}

void batched_linear(Builder& b) {
  const long h = b.r.between(1, 5), k = b.columns(9, 150), n = b.r.between(9, 100);
  const long t = b.w.tokens;
  b.step("cpu.batched_linear", {b.input({t, h, k}), b.weight(n, k, h), b.output({t, h, n})});
}

void swiglu(Builder& b) {
  const long d = b.columns(17, 200), f = b.columns(17, 150), t = b.w.tokens;
  b.step("cpu.swiglu",
         {b.input({t, d}), b.weight(2 * f, d, 1, true), b.weight(d, f), b.output({t, d})});
}

void grouped_mlp(Builder& b) {
  const long d = b.columns(17, 150), f = b.columns(17, 90), t = b.w.tokens;
  const long experts = b.r.between(1, 9), k = b.r.between(1, experts);
  b.step("cpu.grouped_mlp",
         {b.input({t, d}), b.ids(k, experts, true), b.input({t, k}, false, DT_F32),
          b.weight(2 * f, d, experts, true), b.weight(d, f, experts), Builder::none(),
          Builder::none(), b.output({t, d})},
         {{"act", std::string("silu")}});
}

void routed_layer(Builder& b) {
  const long d = b.columns(17, 150), f = b.columns(17, 60), t = b.w.tokens;
  const long experts = b.r.between(2, 20), k = b.r.between(1, experts);
  const Operand x = b.input({t, d}), ids = b.output({t, k}, DT_I32);
  const Operand wts = b.output({t, k}, DT_F32), y = b.output({t, d});
  const Operand normed = b.output({t, d});
  b.step("cpu.rms_norm", {x, b.input({d}, true, DT_F32), normed}, {{"eps", 1e-6}});
  b.step("cpu.moe_route", {normed, b.plain_weight(experts, d), Builder::none(), ids, wts},
         {{"score", std::string("softmax")}});
  b.step("cpu.grouped_mlp",
         {normed, ids, wts, b.weight(2 * f, d, experts, true), b.weight(d, f, experts),
          Builder::none(), Builder::none(), y},
         {{"act", std::string("silu")}});
  b.step("cpu.add", {y, x, b.output({t, d})});
}

void small_steps(Builder& b) {  // many barriers, little work
  const long d = b.r.between(1, 150), t = b.w.tokens;
  Operand x = b.input({t, d});
  const Operand weight = b.input({d}, true, DT_F32);
  for (long i = b.r.between(1, 12); i > 0; --i) {
    const Operand sum = b.output({t, d}), y = b.output({t, d}), z = b.output({t, d});
    b.step("cpu.add_rms_norm", {x, b.input({t, d}), weight, sum, y}, {{"eps", 1e-5}});
    b.step("cpu.sigmoid", {y, z});
    x = b.output({t, d});
    b.step("cpu.mul", {sum, z, x});
  }
}

// Ragged sequences on shuffled pages; sets the call's tokens.
void set_batch(Builder& b, long page_size, long* pages) {
  std::vector<int> seq, pos, start{0}, kv_len, table, out;
  const long sequences = b.r.between(1, 4);
  std::vector<long> blocks;
  for (long s = 0; s < sequences; ++s) {
    const long past = b.r.below(60), fresh = b.r.below(4) ? 1 : b.r.between(1, 40);
    for (long i = 0; i < fresh; ++i) seq.push_back(int(s)), pos.push_back(int(past + i));
    start.push_back(int(seq.size())), kv_len.push_back(int(past + fresh));
    blocks.push_back((past + fresh + page_size - 1) / page_size);
  }
  long most = 0, next = 0;
  for (long n : blocks) most = n > most ? n : most;
  for (long n : blocks)
    for (long i = 0; i < most; ++i) table.push_back(i < n ? int(next++) : -1);
  for (int& page : table)
    if (page >= 0) page = int(next) - 1 - page;
  *pages = next;
  b.w.tokens = long(seq.size()), b.w.has_batch = true;
  b.w.batch = {b.w.tokens,    sequences,      most,          0,          b.ints(seq), b.ints(pos),
               b.ints(start), b.ints(kv_len), b.ints(table), b.ints(out)};
}

void attention(Builder& b) {
  long pages;
  const long page_size = 1L << b.r.between(2, 5);
  set_batch(b, page_size, &pages);
  const long g = b.r.between(1, 3), h = g * b.r.between(1, 4), a = b.r.between(4, 70);
  const long av = b.r.between(4, 70), t = b.w.tokens;
  const Operand state = b.state({g * a, g * av}, pages, page_size);
  b.step("cpu.kv_append", {b.input({t, g, a}), b.input({t, g, av}), state, Builder::batch()},
         {{"layer", 1L}});
  b.step("cpu.sdpa",
         {b.input({t, h, a}), state, Builder::batch(), Builder::none(), b.output({t, h, av})},
         {{"layer", 1L}, {"scale", 0.2}, {"kv_heads", g}});
}

void latent_attention(Builder& b) {
  long pages;
  const long page_size = 1L << b.r.between(2, 5);
  set_batch(b, page_size, &pages);
  const long h = b.r.between(1, 7), latent = b.r.between(4, 90), rope = 2 * b.r.between(1, 16);
  const long t = b.w.tokens;
  const Operand state = b.state({latent + rope}, pages, page_size);
  b.step("cpu.kv_append_latent",
         {b.input({t, latent}), b.input({t, rope}), state, Builder::batch()}, {{"layer", 0L}});
  b.step("cpu.mla_attend",
         {b.input({t, h, latent}), b.input({t, h, rope}), state, Builder::batch(),
          b.output({t, h, latent})},
         {{"layer", 0L}, {"scale", 0.2}});
}

struct Kind {
  const char* name;
  void (*build)(Builder&);
};
constexpr Kind kKinds[] = {
    {"linear", linear},
    {"batched_linear", batched_linear},
    {"swiglu", swiglu},
    {"grouped_mlp", grouped_mlp},
    {"routed_layer", routed_layer},
    {"small_steps", small_steps},
    {"attention", attention},
    {"latent_attention", latent_attention},
};

long random_tokens(Random& r) {
  switch (r.below(8)) {
    case 0:
      return 0;
    case 1:
    case 2:
      return r.between(13, 60);
    case 3:
      return r.between(90, 130);
    default:
      return r.between(1, 8);
  }
}

}  // namespace

std::unique_ptr<Work> random_work(Random& random, const IsaTable& isa) {
  auto work = std::make_unique<Work>();
  Builder b(*work, random, isa);
  const Kind& kind = kKinds[random.below(long(sizeof kKinds / sizeof *kKinds))];
  work->tokens = random_tokens(random);
  b.choose_format();
  kind.build(b);
  work->text =
      std::string(kind.name) + " " + b.format() + ", " + std::to_string(work->tokens) + " tokens";
  return work;
}

}  // namespace stress
