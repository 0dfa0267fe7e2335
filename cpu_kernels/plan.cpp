#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "program.h"

namespace ktg {

namespace {

constexpr int kCounterWords = kPhases * 16;  // a cache line each

[[noreturn]] void reject(const KernelSpec& k, const std::string& what) {
  throw std::invalid_argument(k.name + ": " + what + ". Signature: " + k.name + "(" + k.signature +
                              ")" + (k.attributes.empty() ? "" : " {" + k.attributes + "}"));
}

std::string kind_of(const Operand& o) {
  switch (o.kind) {
    case KIND_NONE:
      return "None";
    case KIND_WEIGHT:
      return "Weight";
    case KIND_STATE:
      return "State of " + std::to_string(o.s.parts) + " part(s)";
    case KIND_BATCH:
      return "BATCH";
    default:
      return "Tensor " + std::string(o.t.dtype == DT_F32    ? "f32"
                                     : o.t.dtype == DT_BF16 ? "bf16"
                                                            : "i32");
  }
}

bool kind_fits(const Operand& o, const std::string& kind) {
  if (const size_t bar = kind.find('|'); bar != std::string::npos)
    return kind_fits(o, kind.substr(0, bar)) || kind_fits(o, kind.substr(bar + 1));
  if (kind == "weight") return o.kind == KIND_WEIGHT;
  if (kind == "batch") return o.kind == KIND_BATCH;
  if (kind == "state1" || kind == "state2")
    return o.kind == KIND_STATE && o.s.parts == kind.back() - '0';
  if (o.kind != KIND_TENSOR) return false;
  if (kind == "i32") return o.t.dtype == DT_I32;
  return kind == "f32" ? o.t.dtype == DT_F32 : o.t.dtype != DT_I32;
}

std::string axis_text(long n) {
  return n == kAxisTokens ? "T" : n == kAxisRows ? "O" : std::to_string(n);
}

// The kernel's dimension names and the sizes they stand for.
class Dims {
 public:
  Dims(const KernelSpec& k) : k_(k) {}
  void bind(const OperandSpec& o, const std::string& name, long size) {
    if (name == "O" && size != kAxisRows)
      reject(k_, o.name + ": the first axis must be O (-2), got " + axis_text(size));
    const auto [at, fresh] = sizes_.emplace(name, size);
    if (!fresh && at->second != size)
      reject(k_, o.name + ": axis " + name + " is " + axis_text(size) + ", but " +
                     axis_text(at->second) + " in the operands before");
  }
  long operator[](const std::string& name) const {
    return sizes_.count(name) ? sizes_.at(name) : 0;
  }

 private:
  const KernelSpec& k_;
  std::map<std::string, long> sizes_;
};

std::string bare(const std::string& dim) { return dim[0] == '?' ? dim.substr(1) : dim; }

void bind_tensor(const KernelSpec& k, const OperandSpec& spec, TensorArg& t, Dims& dims) {
  std::vector<std::string> names = spec.dims;
  const bool optional_axis = names.size() == 3 && names[1][0] == '?';
  if (optional_axis && t.rank == 2) names.erase(names.begin() + 1);
  if (size_t(t.rank) != names.size())
    reject(k, spec.name + ": rank " + std::to_string(spec.dims.size()) +
                  (optional_axis ? " or 2" : "") + " expected, got rank " + std::to_string(t.rank));
  // As given: dim[0 .. rank). Seen by kernels as [first][heads][last].
  const bool runs = names[0] == "T" || names[0] == "O";
  for (int i = 0; i < t.rank; ++i) {
    if (t.dim[i] < 0 && (i > 0 || !runs))
      reject(k, spec.name + ": axis " + names[i] + " must have a fixed size");
    dims.bind(spec, bare(names[i]), t.dim[i]);
  }
  if (optional_axis && t.rank == 2) dims.bind(spec, bare(spec.dims[1]), 1);
  TensorArg n = t;
  if (t.rank == 1 && runs) n.dim[1] = n.dim[2] = 1, n.stride[1] = 0;
  if (t.rank == 1 && !runs)
    n.dim[2] = t.dim[0], n.dim[0] = n.dim[1] = 1, n.stride[0] = n.stride[1] = 0;
  if (t.rank == 2) n.dim[2] = t.dim[1], n.dim[1] = 1, n.stride[1] = 0;
  n.axis = n.dim[0];
  t = n;
}

void bind_weight(const KernelSpec& k, const OperandSpec& spec, const WeightArg& w, Dims& dims) {
  const bool stack = spec.dims.size() == 3, wants_gate_up = spec.dims[stack] == "F2";
  if (!stack && w.count != 1)
    reject(k, spec.name + ": one matrix expected, got a stack of " + std::to_string(w.count));
  if (w.gate_up != wants_gate_up)
    reject(k, spec.name + (wants_gate_up ? ": must be packed with gate_up=True"
                                         : ": must not be packed with gate_up"));
  const bool any_rows = k.name == "cpu.linear" || k.name == "cpu.batched_linear" ||
                        k.name == "cpu.grouped_mlp" || k.name == "cpu.swiglu";
  if (w.activations == ACTS_INT8 && !any_rows)
    reject(k, spec.name + ": this kernel takes activations f32, got a weight for int8");
  if (stack) dims.bind(spec, spec.dims[0], w.count);
  dims.bind(spec, spec.dims[stack], w.rows);
  dims.bind(spec, spec.dims[stack + 1], w.cols);
}

// Once the level and the shapes are known. Of experts, every one gets K / E of the tokens' rows.
void settle_rows(const IsaTable& table, WeightArg& w, const Dims& d) {
  if (w.many_rows == 0) w.many_rows = table.many_rows(w);
  const long experts = d["E"], chosen = d["K"];
  w.many_tokens = experts && chosen ? (w.many_rows * experts + chosen - 1) / chosen : w.many_rows;
}

double attr_number(const KernelSpec& k, const AttrSpec& a, const AttrValue& v) {
  if (!a.choices.empty()) {
    const std::string* text = std::get_if<std::string>(&v);
    for (size_t i = 0; text && i < a.choices.size(); ++i)
      if (a.choices[i] == *text) return double(i);
    reject(k, "attribute " + a.name +
                  (text ? " has the unknown value '" + *text + "'" : " must be a string"));
  }
  if (const bool* b = std::get_if<bool>(&v)) {
    if (a.boolean) return *b;
  } else if (const long* n = std::get_if<long>(&v)) {
    if (!a.boolean) return double(*n);
  } else if (const double* d = std::get_if<double>(&v)) {
    if (!a.boolean && !a.integer) return *d;
  }
  reject(k, "attribute " + a.name + " must be " +
                (a.boolean   ? "a bool"
                 : a.integer ? "an int"
                             : "a number"));
}

void read_attrs(const KernelSpec& k, const std::map<std::string, AttrValue>& given, Instr& in) {
  for (const AttrSpec& a : k.attrs) {
    const auto at = given.find(a.name);
    if (at == given.end() && a.required) reject(k, "attribute " + a.name + " is missing");
    in.attr[a.id] = at == given.end() ? a.value : attr_number(k, a, at->second);
  }
  for (const auto& [name, value] : given) {
    const auto known = [&name = name](const AttrSpec& a) { return a.name == name; };
    if (std::none_of(k.attrs.begin(), k.attrs.end(), known)) reject(k, "unknown attribute " + name);
  }
}

void expect(const KernelSpec& k, bool holds, const std::string& what) {
  if (!holds) reject(k, what);
}

int find_operand(const KernelSpec& k, const std::string& name) {
  for (size_t i = 0; i < k.operands.size(); ++i)
    if (k.operands[i].name == name) return int(i);
  return -1;
}

// Relations that names alone cannot say.
void check_relations(const KernelSpec& k, const Instr& in, const Dims& d) {
  const auto is = [&k](const char* name) { return k.name == std::string("cpu.") + name; };
  const auto text = [](long n) { return std::to_string(n); };
  if (const int s = find_operand(k, "state"); s >= 0) {
    const StateArg& st = in.op[s].s;
    const long layer = long(in.attr[A_LAYER]);
    expect(k, layer >= 0 && layer < st.layers,
           "layer " + text(layer) + " is outside the state's " + text(st.layers) + " layers");
    long want0 = d["R"] + d["P"], want1 = 0;
    if (st.parts == 2) {
      const long g = is("sdpa") ? long(in.attr[A_KV_HEADS]) : d["G"];
      want0 = g * d["A"], want1 = g * d["Av"];
    }
    expect(k, st.row[0] == want0,
           "state row 0 has width " + text(st.row[0]) + ", expected " + text(want0));
    expect(k, st.parts < 2 || st.row[1] == want1,
           "state row 1 has width " + text(st.row[1]) + ", expected " + text(want1));
  }
  if (find_operand(k, "inv_freq") >= 0) {
    const long width = d["P"] ? d["P"] : d["A"];
    expect(k, 2 * d["F"] <= width,
           "inv_freq rotates " + text(2 * d["F"]) + " entries, but a head has " + text(width));
  }
  if (is("rope")) {
    expect(k,
           (in.op[0].kind != 0) == (in.op[4].kind != 0) &&
               (in.op[1].kind != 0) == (in.op[5].kind != 0) &&
               (in.op[0].kind != 0 || in.op[1].kind != 0),
           "q and q_out, k and k_out come in pairs, and one pair must be there");
  }
  if (is("sdpa")) {
    const long g = long(in.attr[A_KV_HEADS]);
    expect(k, g > 0 && d["H"] % g == 0,
           text(d["H"]) + " heads cannot be divided among kv_heads = " + text(g));
    expect(k, in.attr[A_WINDOW] >= 0 && in.attr[A_SOFTCAP] >= 0,
           "window and softcap must not be negative");
  }
  if (is("mla_attend_expanded"))
    expect(k, d["HNV"] == d["H"] * (d["N"] + d["V"]),
           "w_kv_b has " + text(d["HNV"]) +
               " rows, expected H * (N + V) = " + text(d["H"] * (d["N"] + d["V"])));
  if (is("moe_route")) {
    const long e = d["E"], groups = long(in.attr[A_GROUPS]), keep = long(in.attr[A_TOPK_GROUPS]);
    expect(k, e <= 1024, "at most 1024 experts, got " + text(e));
    expect(k, d["K"] <= e, "top-k " + text(d["K"]) + " of " + text(e) + " experts");
    expect(k, groups >= 1 && keep >= 1 && keep <= groups && e % groups == 0,
           "groups = " + text(groups) + " and topk_groups = " + text(keep) + " do not fit " +
               text(e) + " experts");
  }
  if (is("grouped_mlp") || is("swiglu"))
    expect(k, d["F2"] == 2 * d["F"],
           "w13 has " + text(d["F2"]) + " rows, expected twice w2's " + text(d["F"]) + " columns");
  if (is("mul"))
    expect(k, d["D1"] == d["D"] || d["D1"] == 1,
           "b's last axis is " + text(d["D1"]) + ", expected " + text(d["D"]) + " or 1");
  if (is("gather_rows")) expect(k, d["T"] == kAxisTokens, "x's first axis must be T (-1)");
  if (find_operand(k, "batch") >= 0 && !is("gather_rows"))
    expect(k, d["T"] == kAxisTokens,
           "the first axis must be T (-1): the batch says which token is where");
}

}  // namespace

int Program::add(const std::string& kernel, const std::vector<Operand>& operands,
                 const std::map<std::string, AttrValue>& attrs) {
  const KernelSpec* found = find_spec(kernel);
  if (!found)
    throw std::invalid_argument("Plan.add: no kernel named '" + kernel + "'; kernels() lists them");
  const KernelSpec& k = *found;
  if (operands.size() != k.operands.size())
    reject(k, std::to_string(k.operands.size()) +
                  " operands expected (None for an absent one), got " +
                  std::to_string(operands.size()));
  Step step{};
  step.spec = found;
  step.instr.count = int(operands.size());
  Dims dims(k);
  for (size_t i = 0; i < operands.size(); ++i) {
    const OperandSpec& spec = k.operands[i];
    Operand& o = step.instr.op[i];
    o = operands[i];
    if (o.kind == KIND_NONE && spec.optional) continue;
    if (!kind_fits(o, spec.kind))
      reject(k, spec.name + ": " + spec.kind + " expected, got " + kind_of(o));
    if (o.kind == KIND_TENSOR) bind_tensor(k, spec, o.t, dims);
    if (o.kind == KIND_WEIGHT) bind_weight(k, spec, o.w, dims);
  }
  read_attrs(k, attrs, step.instr);
  check_relations(k, step.instr, dims);
  const IsaTable& table = engine_.table();
  for (int i = 0; i < step.instr.count; ++i)
    if (step.instr.op[i].kind == KIND_WEIGHT) settle_rows(table, step.instr.op[i].w, dims);
  for (int i = 0; i < table.count; ++i)
    if (k.name == table.kernels[i].name) step.kernel = &table.kernels[i];
  if (!step.kernel) reject(k, std::string("not built for ") + table.isa);
  engine_.check_process();
  std::lock_guard<std::mutex> lock(engine_.mutex());  // a submitted run may read the steps
  steps_.push_back(step);
  return int(steps_.size()) - 1;
}

void Program::check_batch(const Sizes& sizes, const BatchArg* b) const {
  const auto bad = [](const std::string& what) {
    throw std::invalid_argument("Plan.run: " + what);
  };
  const auto text = [](long n) { return std::to_string(n); };
  long pages = -1, page_size = -1;  // of the state checked last; layers share one
  for (const Step& step : steps_) {
    const int at = find_operand(*step.spec, "batch");
    if (at < 0) continue;
    if (!b) bad(step.spec->name + " reads the batch, but none was given");
    if (b->tokens != sizes.tokens)
      bad("the batch has " + text(b->tokens) + " tokens, T is " + text(sizes.tokens));
    if (step.spec->name == "cpu.gather_rows") {
      if (b->out_count != sizes.rows)
        bad("the batch has " + text(b->out_count) + " out_rows, O is " + text(sizes.rows));
      for (long i = 0; i < b->out_count; ++i)
        if (b->out_rows[i] < 0 || b->out_rows[i] >= sizes.tokens)
          bad("out_rows holds " + text(b->out_rows[i]));
    }
    const int s = find_operand(*step.spec, "state");
    if (s < 0) continue;
    const StateArg& st = step.instr.op[s].s;
    if (st.pages == pages && st.page_size == page_size) continue;
    pages = st.pages, page_size = st.page_size;
    for (long q = 0; q < b->sequences; ++q) {
      const long blocks = (b->kv_len[q] + st.page_size - 1) / st.page_size;
      if (blocks > b->max_blocks)
        bad("sequence " + text(q) + " has " + text(b->kv_len[q]) + " rows, its block table holds " +
            text(b->max_blocks * st.page_size));
      for (long i = 0; i < blocks; ++i)
        if (const long page = b->block_table[q * b->max_blocks + i]; page < 0 || page >= st.pages)
          bad("sequence " + text(q) + " uses page " + text(page) + " of a state of " +
              text(st.pages) + " pages");
    }
  }
}

void Program::run(long tokens, long rows, const BatchArg* batch, double* seconds) {
  engine_.check_process();  // first: in a forked child the mutex may be locked for good
  std::lock_guard<std::mutex> lock(engine_.mutex());
  if (tokens < 0 || rows < 0) throw std::invalid_argument("Plan.run: T and O must not be negative");
  if ((max_tokens_ && tokens > max_tokens_) || (max_rows_ && rows > max_rows_))
    throw std::invalid_argument("Plan.run: T = " + std::to_string(tokens) +
                                ", O = " + std::to_string(rows) +
                                " exceed this plan's max_tokens = " + std::to_string(max_tokens_) +
                                ", max_rows = " + std::to_string(max_rows_));
  sizes_ = {tokens, rows, 0, 0, 0, engine_.threads()};
  if (batch) {
    sizes_.sequences = batch->sequences;
    for (long q = 0; q < batch->sequences; ++q) {
      sizes_.max_kv = std::max(sizes_.max_kv, long(batch->kv_len[q]));
      sizes_.max_new =
          std::max(sizes_.max_new, long(batch->seq_start[q + 1] - batch->seq_start[q]));
    }
  }
  check_batch(sizes_, batch);
  const auto [shared, local] = resolve(sizes_);
  engine_.reserve(shared, local);
  counters_.assign(steps_.size() * kCounterWords, 0);
  batch_ = batch, seconds_ = seconds;
  engine_.run([](void* self, int tid) { static_cast<Program*>(self)->body(tid); }, this);
}

std::pair<size_t, size_t> Program::scratch(const Sizes& sizes) {
  engine_.check_process();
  std::lock_guard<std::mutex> lock(engine_.mutex());
  return resolve(sizes);
}

// Sets the first axes of all operands, and sums up scratch.
std::pair<size_t, size_t> Program::resolve(const Sizes& sizes) {
  size_t shared = 0, local = 0;
  for (Step& s : steps_) {
    for (int i = 0; i < s.instr.count; ++i) {
      Operand& o = s.instr.op[i];
      if (o.kind != KIND_TENSOR) continue;
      o.t.dim[0] = o.t.axis == kAxisTokens ? sizes.tokens
                   : o.t.axis == kAxisRows ? sizes.rows
                                           : o.t.axis;
    }
    if (s.kernel->shared_bytes) shared = std::max(shared, s.kernel->shared_bytes(s.instr, sizes));
    if (s.kernel->local_bytes) local = std::max(local, s.kernel->local_bytes(s.instr, sizes));
  }
  return {shared, local};
}

void Program::body(int tid) {
  using Clock = std::chrono::steady_clock;
  Ctx ctx{tid,      engine_.threads(), engine_.local(tid), engine_.shared(), &sizes_, batch_,
          &engine_, nullptr,           engine_.node(tid),  engine_.nodes()};
  const bool timed = seconds_ && tid == 0;
  auto before = timed ? Clock::now() : Clock::time_point{};
  for (size_t i = 0; i < steps_.size(); ++i) {
    ctx.counters = counters_.data() + i * kCounterWords;
    steps_[i].kernel->run(ctx, steps_[i].instr);
    if (i + 1 < steps_.size() || seconds_) barrier(ctx);
    if (!timed) continue;
    const auto now = Clock::now();
    seconds_[i] = std::chrono::duration<double>(now - before).count();
    before = now;
  }
}

}  // namespace ktg
