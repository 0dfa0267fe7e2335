// The Python face of the engine. Pointers come as integers; Python owns all memory and keeps it
// alive.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <memory>

#include "call.h"
#include "engine.h"
#include "isa.h"
#include "numa.h"
#include "pack.h"
#include "program.h"
#include "repack.h"
#include "service.h"
#include "topology.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace ktg;

namespace ktg {
void bind_limits(nb::module_& m);  // limits.cpp
}

namespace {

struct PyTensor {
  TensorArg t;
};
struct PyWeight {
  WeightArg w;
};
struct PyState {
  StateArg s;
};
struct BatchMarker {};

// The batch owns copies: the engine reads them while Python may already prepare the next step.
struct PyBatch {
  std::vector<int> tok_seq, tok_pos, seq_start, kv_len, table, out_rows;
  BatchArg view{};
};

using Ints = nb::ndarray<const int32_t, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<nb::ro, nb::ndim<2>, nb::device::cpu>;
using Bytes = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void bad(const std::string& what) { throw nb::value_error(what.c_str()); }

int dtype_of(const std::string& name, bool ints) {
  if (name == "f32") return DT_F32;
  if (name == "bf16") return DT_BF16;
  if (ints && name == "i32") return DT_I32;
  bad("unknown dtype '" + name + "' (f32, bf16" + (ints ? " or i32)" : ")"));
}

PyTensor make_tensor(uintptr_t ptr, const std::string& dtype, const std::vector<long>& shape,
                     std::optional<std::vector<long>> strides) {
  PyTensor out{};
  TensorArg& t = out.t;
  t.data = reinterpret_cast<char*>(ptr);
  t.dtype = dtype_of(dtype, true);
  t.rank = int(shape.size());
  if (t.rank < 1 || t.rank > 3) bad("Tensor: rank 1 to 3, got " + std::to_string(t.rank));
  std::vector<long> s(t.rank, 1);
  for (int i = t.rank - 2; i >= 0; --i) s[i] = s[i + 1] * shape[i + 1];
  if (strides) s = *strides;
  if (long(s.size()) != t.rank) bad("Tensor: as many strides as axes");
  // The last axis lies densely, except where there is only the token axis.
  const bool tokens_only = t.rank == 1 && shape[0] < 0;
  if (s.back() != 1 && !tokens_only && shape.back() != 1)
    bad("Tensor: the last stride must be 1, got " + std::to_string(s.back()));
  for (int i = 0; i < t.rank; ++i) {
    if (shape[i] < (i == 0 ? kAxisRows : 1))
      bad("Tensor: axis " + std::to_string(i) + " has size " + std::to_string(shape[i]));
    t.dim[i] = shape[i];
    if (i < 2) t.stride[i] = s[i];
  }
  return out;
}

WeightArg describe(const std::string& format, long rows, long cols, long count, long group,
                   bool gate_up) {
  WeightArg w;
  if (const char* error = describe_weight(format.c_str(), rows, cols, count, group, gate_up, &w))
    bad("weight [" + std::to_string(rows) + ", " + std::to_string(cols) + "] " + format + ": " +
        error);
  return w;
}

PyWeight make_weight(const std::string& format, long rows, long cols, long count, long group,
                     bool gate_up, uintptr_t data, long nbytes, const std::string& activations) {
  PyWeight out{describe(format, rows, cols, count, group, gate_up)};
  if (!activations.empty())
    if (const char* error = set_activations(activations.c_str(), &out.w))
      bad("Weight: " + format + " with activations '" + activations + "': " + error);
  out.w.data = reinterpret_cast<const char*>(data);
  if (data % 64) bad("Weight: data must be 64-byte aligned");
  if (nbytes < out.w.stride * count)
    bad("Weight: " + std::to_string(nbytes) + " bytes given, the packed stack has " +
        std::to_string(out.w.stride * count));
  return out;
}

PyState make_state(const std::string& dtype, long layers, long pages, long page_size,
                   const std::vector<long>& part_rows, const std::vector<uintptr_t>& parts) {
  PyState out{};
  StateArg& s = out.s;
  if (part_rows.empty() || part_rows.size() > 2 || part_rows.size() != parts.size())
    bad("State: one or two parts, with a row width each");
  if (layers < 1 || pages < 1 || page_size < 1)
    bad("State: layers, pages and page_size must be positive");
  s.dtype = dtype_of(dtype, false);
  s.parts = int(parts.size());
  s.layers = layers, s.pages = pages, s.page_size = page_size;
  for (int i = 0; i < s.parts; ++i)
    s.row[i] = part_rows[i], s.data[i] = reinterpret_cast<char*>(parts[i]);
  return out;
}

std::vector<int> ints(const Ints& a, const char* name, size_t rank) {
  if (a.ndim() != rank)
    bad(std::string("Batch.set: ") + name + " must have " + std::to_string(rank) + " axes");
  return std::vector<int>(a.data(), a.data() + a.size());
}

void check(const PyBatch& b) {
  const BatchArg& v = b.view;
  const auto text = [](long n) { return std::to_string(n); };
  if (long(b.tok_pos.size()) != v.tokens) bad("Batch.set: tok_pos and tok_seq differ in length");
  if (long(b.seq_start.size()) != v.sequences + 1)
    bad("Batch.set: seq_start must have one entry more than kv_len");
  if (b.seq_start.front() != 0 || b.seq_start.back() != v.tokens)
    bad("Batch.set: seq_start must go from 0 to the number of tokens");
  for (long s = 0; s < v.sequences; ++s) {
    if (b.seq_start[s] > b.seq_start[s + 1]) bad("Batch.set: seq_start must not decrease");
    if (b.kv_len[s] < 0) bad("Batch.set: kv_len of sequence " + text(s) + " is negative");
    for (long t = b.seq_start[s]; t < b.seq_start[s + 1]; ++t) {
      if (b.tok_seq[t] != s)
        bad("Batch.set: token " + text(t) + " belongs to sequence " + text(s) +
            " by seq_start, to " + text(b.tok_seq[t]) + " by tok_seq");
      if (b.tok_pos[t] < 0 || b.tok_pos[t] >= b.kv_len[s])
        bad("Batch.set: token " + text(t) + " is at position " + text(b.tok_pos[t]) +
            ", its sequence has kv_len " + text(b.kv_len[s]));
    }
  }
}

void point(PyBatch& b) {
  BatchArg& v = b.view;
  v.tok_seq = b.tok_seq.data(), v.tok_pos = b.tok_pos.data(), v.seq_start = b.seq_start.data();
  v.kv_len = b.kv_len.data(), v.block_table = b.table.data(), v.out_rows = b.out_rows.data();
}

void set_batch(PyBatch& b, const Ints& tok_seq, const Ints& tok_pos, const Ints& seq_start,
               const Ints& kv_len, const Ints& block_table, const Ints& out_rows) {
  PyBatch n;
  n.tok_seq = ints(tok_seq, "tok_seq", 1), n.tok_pos = ints(tok_pos, "tok_pos", 1);
  n.seq_start = ints(seq_start, "seq_start", 1), n.kv_len = ints(kv_len, "kv_len", 1);
  n.table = ints(block_table, "block_table", 2), n.out_rows = ints(out_rows, "out_rows", 1);
  if (block_table.shape(0) < n.kv_len.size())
    bad("Batch.set: block_table must have a row per sequence");
  n.view = {long(n.tok_seq.size()),
            long(n.kv_len.size()),
            long(block_table.shape(1)),
            long(n.out_rows.size()),
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            nullptr};
  check(n);
  b = std::move(n);
  point(b);
}

Operand operand_of(nb::handle h) {
  Operand o{};
  if (h.is_none())
    o.kind = KIND_NONE;
  else if (nb::isinstance<PyTensor>(h))
    o.kind = KIND_TENSOR, o.t = nb::cast<PyTensor&>(h).t;
  else if (nb::isinstance<PyWeight>(h))
    o.kind = KIND_WEIGHT, o.w = nb::cast<PyWeight&>(h).w;
  else if (nb::isinstance<PyState>(h))
    o.kind = KIND_STATE, o.s = nb::cast<PyState&>(h).s;
  else if (nb::isinstance<BatchMarker>(h))
    o.kind = KIND_BATCH;
  else
    throw nb::type_error("Plan.add: an operand must be Tensor, Weight, State, BATCH or None");
  return o;
}

AttrValue attr_of(nb::handle h, const std::string& name) {
  if (PyBool_Check(h.ptr())) return nb::cast<bool>(h);
  if (PyLong_Check(h.ptr())) return nb::cast<long>(h);
  if (PyFloat_Check(h.ptr())) return nb::cast<double>(h);
  if (PyUnicode_Check(h.ptr())) return nb::cast<std::string>(h);
  throw nb::type_error(
      ("Plan.add: attribute " + name + " must be an int, float, bool or str").c_str());
}

int add_step(Program& p, const std::string& kernel, nb::list operands, nb::dict attrs) {
  std::vector<Operand> ops;
  for (nb::handle h : operands) ops.push_back(operand_of(h));
  std::map<std::string, AttrValue> values;
  for (auto [key, value] : attrs) {
    const std::string name = nb::cast<std::string>(key);
    values[name] = attr_of(value, name);
  }
  return p.add(kernel, ops, values);
}

void run_plan(Program& p, long tokens, long rows, const PyBatch* batch) {
  const BatchArg* view = batch ? &batch->view : nullptr;
  nb::gil_scoped_release release;
  p.run(tokens, rows, view, nullptr);
}

std::vector<double> time_plan(Program& p, long tokens, long rows, const PyBatch* batch) {
  std::vector<double> seconds(p.size() + 1);
  const BatchArg* view = batch ? &batch->view : nullptr;
  {
    nb::gil_scoped_release release;
    p.run(tokens, rows, view, seconds.data());
  }
  seconds.pop_back();
  return seconds;
}

// With a copy of the batch: Python may set the next one while this call is pending.
CallSizes call_sizes(long tokens, long rows, const PyBatch* batch, uintptr_t header) {
  CallSizes s;
  s.tokens = tokens, s.rows = rows;
  if (header % 4) bad("header: must be the 4-byte aligned address of int32 T and O");
  s.header = reinterpret_cast<const int32_t*>(header);
  if (!batch) return s;
  const auto copy = std::make_shared<PyBatch>(*batch);
  point(*copy);
  s.has_batch = true, s.batch = copy->view, s.keep = copy;
  return s;
}

Call* submit(Program& p, long tokens, long rows, const PyBatch* batch) {
  auto call = std::make_unique<Call>(p, call_sizes(tokens, rows, batch, 0));
  call->submit();
  return call.release();
}

void add_mailbox(Service& s, Program& p, uintptr_t request, uintptr_t reply, uintptr_t header,
                 long tokens, long rows, const PyBatch* batch) {
  s.add({reinterpret_cast<uint32_t*>(request), reinterpret_cast<uint32_t*>(reply), &p,
         call_sizes(tokens, rows, batch, header)});
}

long nanoseconds(double us) {
  if (!(us >= 0 && us <= 1e9)) bad("spin_us must be between 0 and 1e9 microseconds");
  return long(us * 1000);
}

Service* serve(Program& p, uintptr_t request, uintptr_t reply, uintptr_t header, long tokens,
               long rows, const PyBatch* batch, double spin_us) {
  auto service = std::make_unique<Service>(p.engine(), nanoseconds(spin_us));
  add_mailbox(*service, p, request, reply, header, tokens, rows, batch);
  service->start();
  return service.release();
}

nb::dict topology(const std::string& root) {
  const Topology t = read_topology(root);
  nb::list cpus;
  for (const Cpu& c : t.cpus) cpus.append(nb::make_tuple(c.number, c.core, t.nodes[c.node]));
  nb::dict out;
  out["cpus"] = cpus;
  out["nodes"] = t.nodes;
  out["quota"] = t.quota;
  return out;
}

using Slices = std::vector<std::tuple<long, long, int>>;

Slices slices_of(const std::string& format, long rows, long cols, long group, long count,
                 bool gate_up, int nodes) {
  Slices out;
  for (const NodeSlice& s : node_slices(describe(format, rows, cols, count, group, gate_up), nodes))
    out.emplace_back(s.begin, s.end, s.node);
  return out;
}

std::string place_slices(uintptr_t address, size_t nbytes, const Slices& slices,
                         const std::vector<int>& nodes) {
  std::vector<NodeSlice> native;
  for (const auto& [begin, end, node] : slices) native.push_back({begin, end, node});
  nb::gil_scoped_release release;
  return numa_place(address, nbytes, native, nodes);
}

// A dense [rows, cols] matrix: an array (numpy f32, torch f32 or bf16) or a Tensor.
Source source_of(nb::handle h) {
  if (nb::isinstance<PyTensor>(h)) {
    const TensorArg& t = nb::cast<PyTensor&>(h).t;
    if (t.rank != 2 || t.dim[0] < 0 || t.dtype == DT_I32)
      bad("pack: the source must be f32 or bf16 [rows, cols]");
    return {t.data, t.dtype, t.dim[0], t.dim[1], t.stride[0]};
  }
  const Matrix a = nb::cast<Matrix>(h);
  const auto type = a.dtype();
  const bool bf16 = type.code == uint8_t(nb::dlpack::dtype_code::Bfloat) && type.bits == 16;
  if (!bf16 && type != nb::dtype<float>()) bad("pack: the source must be f32 or bf16");
  if (a.stride(1) != 1 && a.shape(1) != 1) bad("pack: the source's last stride must be 1");
  return {static_cast<const char*>(a.data()), bf16 ? DT_BF16 : DT_F32, long(a.shape(0)),
          long(a.shape(1)), a.stride(0)};
}

const IsaTable& pack_isa(const std::string& isa) { return choose_isa(isa); }

void pack_into(uintptr_t dst, long index, const std::string& format, long rows, long cols,
               long group, long count, bool gate_up, nb::handle src, const std::string& isa) {
  const WeightArg w = describe(format, rows, cols, count, group, gate_up);
  const Source source = source_of(src);
  const IsaTable& table = pack_isa(isa);
  nb::gil_scoped_release release;
  pack_matrix(table, w, reinterpret_cast<char*>(dst), index, source);
}

void pack_ints_into(uintptr_t dst, long index, const std::string& format, long rows, long cols,
                    long group, long count, bool gate_up, const Bytes& q, const Floats& scales,
                    const std::optional<Bytes>& zeros) {
  const WeightArg w = describe(format, rows, cols, count, group, gate_up);
  const auto whole = nb::dlpack::dtype_code::Int, natural = nb::dlpack::dtype_code::UInt;
  const auto is_byte = [&](const Bytes& a) {
    const auto code = a.dtype().code;
    return a.dtype().bits == 8 && (code == uint8_t(whole) || code == uint8_t(natural));
  };
  if (!is_byte(q) || (zeros && !is_byte(*zeros)))
    bad("pack_ints_into: integers and zero points are 8-bit integers");
  const bool fit =
      !zeros || (zeros->shape(0) == scales.shape(0) && zeros->shape(1) == scales.shape(1));
  if (!fit) bad("pack_ints_into: as many zero points as scales");
  const Given given{static_cast<const uint8_t*>(q.data()),
                    long(q.shape(0)),
                    long(q.shape(1)),
                    scales.data(),
                    long(scales.shape(0)),
                    long(scales.shape(1)),
                    zeros ? static_cast<const uint8_t*>(zeros->data()) : nullptr};
  nb::gil_scoped_release release;
  pack_ints(w, reinterpret_cast<char*>(dst), index, given);
}

using Blocks = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void repack_into(uintptr_t dst, long index, const std::string& format, long rows, long cols,
                 long group, long count, bool gate_up, const Blocks& blocks) {
  const WeightArg w = describe(format, rows, cols, count, group, gate_up);
  nb::gil_scoped_release release;
  repack_matrix(w, reinterpret_cast<char*>(dst), index,
                {blocks.data(), long(blocks.shape(0)), long(blocks.shape(1))});
}

template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<2>> new_array(size_t rows, size_t cols, T** data) {
  *data = new T[rows * cols];
  nb::capsule owner(*data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<2>>(*data, {rows, cols}, owner);
}

auto quantize(const std::string& format, long group, nb::handle src) {
  const Source source = source_of(src);
  const WeightArg w = describe(format, source.rows, source.cols, 1, group, false);
  if (!has_integers(w.format))
    bad("quantize: " + format + " is no integer format (int8, int4, ...)");
  std::unique_ptr<char, void (*)(void*)> bytes(static_cast<char*>(std::aligned_alloc(64, w.stride)),
                                               std::free);
  pack_matrix(pack_isa(""), w, bytes.get(), 0, source);
  int8_t* q;
  float* scales;
  auto out =
      std::make_pair(new_array(w.rows, w.cols, &q),
                     new_array(w.rows, w.group ? (w.cols + w.group - 1) / w.group : 1, &scales));
  read_quantized(w, bytes.get(), 0, q, scales);
  return out;
}

auto unpack(uintptr_t src, long index, const std::string& format, long rows, long cols, long group,
            long count, bool gate_up) {
  const WeightArg w = describe(format, rows, cols, count, group, gate_up);
  if (index < 0 || index >= count) bad("unpack: index outside the stack");
  float* dst;
  auto out = new_array(rows, cols, &dst);
  unpack_matrix(w, reinterpret_cast<const char*>(src), index, dst);
  return out;
}

// Bytes for packed weights: aligned to huge pages when large, which saves many TLB misses in
// decode.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> empty_packed(size_t nbytes) {
  // Whole pages of its own: a GPU's driver registers pages, whoever else has bytes on them.
  const size_t huge = size_t(2) << 20, page = 4096, align = nbytes >= huge ? huge : page;
  const size_t padded = (nbytes + align - 1) / align * align;
  void* p = std::aligned_alloc(align, padded ? padded : align);
  if (!p) throw std::bad_alloc();
  if (align == huge) madvise(p, padded, MADV_HUGEPAGE);  // a hint
  nb::capsule owner(p, [](void* q) noexcept { std::free(q); });
  return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(p, {nbytes}, owner);
}

nb::dict isa_info() {
  const IsaInfo& info = detect_isa();
  nb::dict out;
  out["flags"] = info.flags;
  out["levels"] = info.levels;
  out["best"] = info.best;
  out["missing_for_next"] = info.missing;
  std::string why;
  try {
    out["chosen"] = choose_isa("", &why).isa;
  } catch (const std::exception& e) {
    out["chosen"] = nb::none();
    why = e.what();
  }
  out["why"] = why;
  return out;
}

std::map<std::string, std::string> kernels() {
  std::map<std::string, std::string> out;
  for (const KernelSpec& k : kernel_specs())
    out[k.name] = k.note + "\n  operands: " + k.signature +
                  "\n  attributes: " + (k.attributes.empty() ? "none" : k.attributes);
  return out;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "ktgraph's native CPU engine and kernels";
  // a user's global or stored exception may keep an engine alive to the end: no leak of ours
  nb::set_leak_warnings(false);

  nb::class_<PyTensor>(
      m, "Tensor",
      "A strided view; -1 (tokens) or -2 (output rows) as first size is set by each run.")
      .def(
          "__init__",
          [](PyTensor* t, uintptr_t ptr, const std::string& dtype, const std::vector<long>& shape,
             std::optional<std::vector<long>> strides) {
            new (t) PyTensor(make_tensor(ptr, dtype, shape, strides));
          },
          "ptr"_a, "dtype"_a, "shape"_a, "strides"_a = nb::none());
  nb::class_<PyWeight>(m, "Weight",
                       "A packed matrix, or a stack of `count`; the caller keeps the memory alive.")
      .def(
          "__init__",
          [](PyWeight* w, const std::string& format, long rows, long cols, long count, long group,
             bool gate_up, uintptr_t data, long nbytes, const std::string& activations) {
            new (w) PyWeight(
                make_weight(format, rows, cols, count, group, gate_up, data, nbytes, activations));
          },
          "format"_a, "rows"_a, "cols"_a, "count"_a, "group"_a, "gate_up"_a, "data"_a, "nbytes"_a,
          "activations"_a = "");
  nb::class_<PyState>(m, "State", "A paged cache; each part is [layer][page][page_size][row].")
      .def(
          "__init__",
          [](PyState* s, const std::string& dtype, long layers, long pages, long page_size,
             const std::vector<long>& part_rows, const std::vector<uintptr_t>& parts) {
            new (s) PyState(make_state(dtype, layers, pages, page_size, part_rows, parts));
          },
          "dtype"_a, "layers"_a, "pages"_a, "page_size"_a, "part_rows"_a, "parts"_a);
  nb::class_<PyBatch>(m, "Batch", "Which token belongs to which sequence; read at run time.")
      .def(nb::init<>())
      .def("set", &set_batch, "tok_seq"_a, "tok_pos"_a, "seq_start"_a, "kv_len"_a, "block_table"_a,
           "out_rows"_a);
  nb::class_<BatchMarker>(m, "BatchMarker");
  m.attr("BATCH") = BatchMarker{};

  nb::class_<Engine>(
      m, "Engine", "Persistent threads; the caller is one of them. threads=0: one per allowed CPU.")
      .def(
          "__init__",
          [](Engine* e, int threads, std::optional<std::vector<int>> cpus, const std::string& isa,
             std::optional<std::vector<int>> nodes) {
            new (e) Engine(threads, cpus.value_or(std::vector<int>{}), isa,
                           nodes.value_or(std::vector<int>{}));
          },
          "threads"_a = 0, "cpus"_a = nb::none(), "isa"_a = "", "nodes"_a = nb::none())
      .def_prop_ro("threads", &Engine::threads)
      .def_prop_ro("nodes", &Engine::node_numbers,
                   "Numbers of the memory nodes its threads are on.")
      .def_prop_ro("cpus", &Engine::cpus)
      .def_prop_ro("isa", [](const Engine& e) { return e.table().isa; });

  nb::class_<Program>(
      m, "Plan",
      "Instructions run as one region: every thread does its share of each, with barriers between.")
      .def(nb::init<Engine&, long, long>(), "engine"_a, "max_tokens"_a = 0, "max_rows"_a = 0,
           nb::keep_alive<1, 2>())
      .def("add", &add_step, "kernel"_a, "operands"_a, "attrs"_a = nb::dict(),
           "Checks and appends one instruction; returns its index.")
      .def("run", &run_plan, "T"_a, "O"_a = 0, "batch"_a = nb::none())
      .def("submit", &submit, "T"_a, "O"_a = 0, "batch"_a = nb::none(), nb::keep_alive<0, 1>(),
           "Runs without the caller, after what was submitted before; returns the Call.")
      .def(
          "prepare",
          [](Program& p, long tokens, long rows, const PyBatch* batch, uintptr_t header) {
            return new Call(p, call_sizes(tokens, rows, batch, header));
          },
          "T"_a = 0, "O"_a = 0, "batch"_a = nb::none(), "header"_a = 0, nb::keep_alive<0, 1>(),
          "A Call that is not submitted yet.")
      .def("serve", &serve, "request"_a, "reply"_a, "header"_a = 0, "T"_a = 0, "O"_a = 0,
           "batch"_a = nb::none(), "spin_us"_a = 200.0, nb::keep_alive<0, 1>(),
           "A started Service with this one mailbox.")
      .def("run_timed", &time_plan, "T"_a, "O"_a = 0, "batch"_a = nb::none(),
           "Seconds per instruction.")
      .def(
          "scratch",
          [](Program& p, long tokens, long rows, long sequences, long max_new, long max_kv,
             int threads) {
            const auto [shared, local] =
                p.scratch({tokens, rows, sequences, max_kv, max_new, threads});
            return std::make_tuple(shared, local);
          },
          "T"_a, "O"_a, "sequences"_a, "max_new"_a, "max_kv"_a, "threads"_a,
          "(bytes shared by all threads, bytes of each thread) that a run of these sizes keeps.")
      .def("__len__", &Program::size)
      .def("kernel", [](const Program& p, int i) {
        if (i < 0 || i >= p.size()) throw nb::index_error();
        return p.name(i);
      });

  nb::class_<Call>(m, "Call", "A plan with its sizes, to run any number of times, one at a time.")
      .def(
          "set",
          [](Call& c, long tokens, long rows, const PyBatch* batch, uintptr_t header) {
            c.set(call_sizes(tokens, rows, batch, header));
          },
          "T"_a = 0, "O"_a = 0, "batch"_a = nb::none(), "header"_a = 0)
      .def("submit", &Call::submit)
      .def("run", &Call::run, nb::call_guard<nb::gil_scoped_release>(),
           "On the calling thread; wait() tells whether it failed.")
      .def("done", &Call::done)
      .def("wait", &Call::wait, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("address", [](const Call& c) { return reinterpret_cast<uintptr_t>(&c); });
  m.attr("RUN_CALL") = reinterpret_cast<uintptr_t>(&ktgraph_run_call);
  m.attr("SUBMIT_CALL") = reinterpret_cast<uintptr_t>(&ktgraph_submit_call);
  m.attr("WAIT_CALL") = reinterpret_cast<uintptr_t>(&ktgraph_wait_call);

  nb::class_<Service>(m, "Service", "A thread that watches mailboxes and answers them with plans.")
      .def(
          "__init__",
          [](Service* s, Engine& engine, double spin_us) {
            new (s) Service(engine, nanoseconds(spin_us));
          },
          "engine"_a, "spin_us"_a = 200.0, nb::keep_alive<1, 2>())
      .def("add", &add_mailbox, "plan"_a, "request"_a, "reply"_a, "header"_a = 0, "T"_a = 0,
           "O"_a = 0, "batch"_a = nb::none(), nb::keep_alive<1, 2>())
      .def("start", &Service::start)
      .def(
          "stop",
          [](Service& s) {
            {
              nb::gil_scoped_release release;
              s.stop();
            }
            s.check();
          },
          "Ends the watching, then check().")
      .def("check", &Service::check)
      .def_prop_ro("running", &Service::running)
      .def_prop_ro("served", &Service::served)
      .def_prop_ro("busy_seconds", [](const Service& s) { return s.busy_ns() * 1e-9; })
      .def(
          "spans",
          [](Service& s) {
            std::vector<std::tuple<int, long, long>> out;
            for (const Span& span : s.take_spans())
              out.emplace_back(span.box, span.begin_ns, span.end_ns);
            return out;
          },
          "(mailbox, begin, end) of requests answered since the last call, in nanoseconds.");
  m.attr("REPLY_FAILED") = kReplyFailed;

  m.def(
      "packed_nbytes",
      [](const std::string& format, long rows, long cols, long group, long count, bool gate_up) {
        const WeightArg w = describe(format, rows, cols, count, group, gate_up);
        return w.stride * w.count;
      },
      "format"_a, "rows"_a, "cols"_a, "group"_a = 0, "count"_a = 1, "gate_up"_a = false);
  m.def("pack_into", &pack_into, "dst"_a, "index"_a, "format"_a, "rows"_a, "cols"_a, "group"_a,
        "count"_a, "gate_up"_a, "src"_a, "isa"_a = "",
        "Packs matrix `index` of a stack; releases the GIL, so threads may pack side by side.");
  m.def("pack_ints_into", &pack_ints_into, "dst"_a, "index"_a, "format"_a, "rows"_a, "cols"_a,
        "group"_a, "count"_a, "gate_up"_a, "q"_a, "scales"_a, "zeros"_a = nb::none(),
        "Packs matrix `index` from integers and scales as they are; releases the GIL.");
  m.def("repack_into", &repack_into, "dst"_a, "index"_a, "format"_a, "rows"_a, "cols"_a, "group"_a,
        "count"_a, "gate_up"_a, "blocks"_a,
        "Packs matrix `index` from a GGUF tensor's bytes [rows, bytes of a row], bit by bit.");
  m.def("quantize", &quantize, "format"_a, "group"_a, "src"_a,
        "Integers and f32 scales of a matrix.");
  m.def("unpack", &unpack, "src"_a, "index"_a, "format"_a, "rows"_a, "cols"_a, "group"_a = 0,
        "count"_a = 1, "gate_up"_a = false);
  m.def("empty_packed", &empty_packed, "nbytes"_a,
        "uint8 array in pages of its own, for weights; contents unspecified.");
  m.def("isa_info", &isa_info, "Detected CPU flags, the chosen level and why.");
  m.def(
      "default_cpus", [](const std::string& root) { return order_cpus(read_topology(root)); },
      "root"_a = "", "CPUs an Engine uses by default.");
  m.def("topology", &topology, "root"_a = "", "Usable CPUs with core and memory node; the quota.");
  m.def("node_slices", &slices_of, "format"_a, "rows"_a, "cols"_a, "group"_a = 0, "count"_a = 1,
        "gate_up"_a = false, "nodes"_a = 1, "(begin, end, node) in bytes of a packed stack.");
  m.def("numa_place", &place_slices, "address"_a, "nbytes"_a, "slices"_a, "nodes"_a,
        "Binds slices to memory nodes; returns '' or why the system refused.");
  m.def("numa_node_of", &numa_node_of, "address"_a, "Memory node of a page; -1 when refused.");
  m.def("kernels", &kernels, "Kernel name -> what it does, its operands and attributes.");
  bind_limits(m);
}
