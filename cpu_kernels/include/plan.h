// What a kernel is given, and the table an ISA unit exports. Plain data only (see formats.h).
#pragma once
#include <cstddef>
#include <cstdint>

#include "batch.h"
#include "formats.h"
#include "tensor.h"

namespace ktg {

class Engine;

enum Kind : int { KIND_NONE = 0, KIND_TENSOR, KIND_WEIGHT, KIND_STATE, KIND_BATCH };

struct Operand {
  int kind;
  TensorArg t;
  WeightArg w;
  StateArg s;
};

enum Attr : int {
  A_EPS,
  A_SCALE,
  A_STYLE,
  A_LAYER,
  A_WINDOW,
  A_SOFTCAP,
  A_KV_HEADS,
  A_SCORE,
  A_RENORM,
  A_GROUPS,
  A_TOPK_GROUPS,
  A_GROUP_SCORE,
  A_MASK,
  A_ACT,
  A_ALPHA,
  A_LIMIT,
  A_BIAS_IN_LOGITS,
  A_LATE_CAST,
  A_COUNT
};

// Values of choice attributes, in the order in which the registry lists them.
enum RopeStyle : int { ROPE_HALF, ROPE_INTERLEAVED, ROPE_TO_HALF };
enum Score : int { SCORE_SOFTMAX, SCORE_SIGMOID, SCORE_SOFTMAX_AFTER_TOPK };
enum GroupScore : int { GROUP_MAX, GROUP_TOP2SUM };
enum MaskFill : int { MASK_ZERO, MASK_NEG_INF };
enum Act : int { ACT_SILU, ACT_GELU, ACT_GELU_TANH, ACT_RELU, ACT_SWIGLU_CLAMPED };

constexpr int kMaxOperands = 9;
constexpr int kPhases = 4;     // work counters per instruction
constexpr int kMaxNodes = 16;  // memory nodes whose units are kept apart: a cache line's words

struct Instr {
  Operand op[kMaxOperands];
  int count;
  double attr[A_COUNT];
};

// Sizes of one run, from which scratch is computed before the threads start.
struct Sizes {
  long tokens, rows, sequences, max_kv, max_new;  // max_new: most new tokens of one sequence
  int threads;
};

// One thread's view of one instruction.
struct Ctx {
  int tid, threads;
  char* local;   // this thread's scratch
  char* shared;  // scratch of all threads, unspecified at the start of an instruction
  const Sizes* sizes;
  const BatchArg* batch;
  Engine* engine;
  uint32_t* counters;  // kPhases counters, a cache line apart, 0 at the start
  int node, nodes;     // this thread's memory node, 0 .. nodes - 1
};

// Defined in engine.cpp, not inline: see formats.h.
void barrier(const Ctx& ctx);  // throws when another thread failed
// The same in two steps. In between a thread may do what needs no other one, until it is `opened`.
uint32_t arrive(const Ctx& ctx);
bool opened(const Ctx& ctx, uint32_t ticket);
void await(const Ctx& ctx, uint32_t ticket);
// 0, 1, 2 ... of a phase's units on a memory node, each number to one thread. See kernels/units.h.
long next_unit(const Ctx& ctx, int phase, long node = 0);
void reset_units(const Ctx& ctx, int phase);  // by one thread, between barriers
void fail(const Ctx& ctx, const char* what,
          long value);  // first message wins; the run raises it at its end

struct Kernel {
  const char* name;
  void (*run)(const Ctx&, const Instr&);
  size_t (*shared_bytes)(const Instr&, const Sizes&);  // may be null
  size_t (*local_bytes)(const Instr&, const Sizes&);   // may be null
};

// Packs one matrix. `src` rows are `src_stride` elements apart. Returns the first bad row, or -1.
struct PackJob {
  WeightArg w;
  char* dst;  // start of the matrix
  const char* src;
  int src_dtype;
  long src_stride;
  float* rows;  // scratch: 16 * kpad + 64 floats
};

struct IsaTable {
  const char* isa;
  const Kernel* kernels;
  int count;
  long (*pack)(const PackJob&);
  long (*many_rows)(const WeightArg&);  // default of WeightArg::many_rows
};

const IsaTable& avx2_table();
const IsaTable& avx2_vnni_table();
const IsaTable& avx512_table();
const IsaTable& avx512_vnni_table();
const IsaTable& avx512_bf16_table();
const IsaTable& amx_table();
const IsaTable& amx_emulated_table();

}  // namespace ktg
