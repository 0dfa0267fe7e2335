// cpu.moe_route: logits of all experts in f32, then per token the choice of experts and their
// weights. Selection is by score plus bias, highest first, the lower id on ties; weights come from
// the scores without bias.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

constexpr long kMaxExperts = 1024;
constexpr float kMinusInf = -__builtin_inff();

template <int DTYPE>
KTG_IN F gate_lanes(const char* row, long k) {
  if constexpr (DTYPE == DT_F32) return load(reinterpret_cast<const float*>(row) + k);
  return load_bf16(reinterpret_cast<const u16*>(row) + k);
}

// Dot products of four rows of the gate with one token; lanes first, then one fixed sum.
template <int DTYPE>
static void gate_dots(const char* const (&rows)[4], const float* x, long n, float* out) {
  F acc[4] = {zero(), zero(), zero(), zero()};
  long k = 0;
  for (; k + 16 <= n; k += 16) {
    const F xv = load(x + k);
    for (int i = 0; i < 4; ++i) acc[i] = fma(gate_lanes<DTYPE>(rows[i], k), xv, acc[i]);
  }
  for (int i = 0; i < 4; ++i) {
    if (k < n) {
      float tail[16] = {};
      widen(rows[i] + k * item_bytes(DTYPE), DTYPE, n - k, tail);
      acc[i] = fma(load(tail), load(x + k), acc[i]);  // x is padded with zeros
    }
    out[i] = sum(acc[i]);
  }
}

static void gate_token(const TensorArg& gate, long e0, long e1, const float* x, float* logits) {
  for (long e = e0; e < e1; e += 4) {
    const char* rows[4];
    float out[4];
    for (int i = 0; i < 4; ++i) rows[i] = row_ptr(gate, lmin(e + i, e1 - 1), 0);
    gate.dtype == DT_F32 ? gate_dots<DT_F32>(rows, x, gate.dim[2], out)
                         : gate_dots<DT_BF16>(rows, x, gate.dim[2], out);
    for (long i = 0; i < lmin(4, e1 - e); ++i) logits[e + i] = out[i];
  }
}

// Scores in place of logits.
static void score_experts(float* s, long experts, int score) {
  if (score == SCORE_SOFTMAX_AFTER_TOPK) return;
  float top = s[0];
  for (long e = 1; e < experts; ++e) top = s[e] > top ? s[e] : top;
  F total = zero();
  for (long e = 0; e < experts; e += 16) {
    const long left = experts - e;
    F v = load_n(s + e, left);
    v = score == SCORE_SIGMOID ? sigmoid(v) : exp(sub(v, set1(top)));
    store_n(s + e, v, left);
    total = add(total, load_n(s + e, left));
  }
  if (score == SCORE_SIGMOID) return;
  const F r = set1(sum(total));
  for (long e = 0; e < experts; e += 16)
    store_n(s + e, div(load_n(s + e, experts - e), r), experts - e);
}

KTG_IN long best_index(const float* v, long n) {
  long best = 0;
  for (long i = 1; i < n; ++i)
    if (v[i] > v[best]) best = i;
  return best;
}

KTG_IN float group_value(const float* v, long n, int how) {
  float first = kMinusInf, second = kMinusInf;
  for (long i = 0; i < n; ++i) {
    if (v[i] > first)
      second = first, first = v[i];
    else if (v[i] > second)
      second = v[i];
  }
  return how == GROUP_MAX || n < 2 ? first : first + second;
}

// Leaves only the experts of the best groups selectable.
static void mask_groups(float* pick, long experts, const Instr& in) {
  const long groups = long(in.attr[A_GROUPS]), keep = long(in.attr[A_TOPK_GROUPS]),
             size = experts / groups;
  if (groups <= 1 || keep >= groups) return;
  float value[kMaxExperts];
  bool kept[kMaxExperts] = {};
  for (long g = 0; g < groups; ++g)
    value[g] = group_value(pick + g * size, size, int(in.attr[A_GROUP_SCORE]));
  for (long i = 0; i < keep; ++i) {
    const long g = best_index(value, groups);
    kept[g] = true, value[g] = kMinusInf;
  }
  const float fill = int(in.attr[A_MASK]) == MASK_ZERO ? 0.0f : kMinusInf;
  for (long e = 0; e < experts; ++e)
    if (!kept[e / size]) pick[e] = fill;
}

static void choose_experts(const Instr& in, float* scores, const float* bias, long experts, long k,
                           int* ids, float* wts) {
  float pick[kMaxExperts];
  const int score = int(in.attr[A_SCORE]);
  if (in.attr[A_BIAS_IN_LOGITS] != 0 && bias)
    for (long e = 0; e < experts; ++e) scores[e] += bias[e];
  score_experts(scores, experts, score);
  const bool late = bias && in.attr[A_BIAS_IN_LOGITS] == 0;
  for (long e = 0; e < experts; ++e) pick[e] = late ? scores[e] + bias[e] : scores[e];
  mask_groups(pick, experts, in);
  bool taken[kMaxExperts] = {};
  for (long i = 0; i < k; ++i) {
    long best = -1;
    for (long e = 0; e < experts; ++e)
      if (!taken[e] && (best < 0 || pick[e] > pick[best])) best = e;
    taken[best] = true;
    ids[i] = int(best), wts[i] = scores[best];
  }
  if (score == SCORE_SOFTMAX_AFTER_TOPK) score_experts(wts, k, SCORE_SOFTMAX);
  float factor = float(in.attr[A_SCALE]);
  float total = 0;
  for (long i = 0; i < k; ++i) total += wts[i];
  if (in.attr[A_RENORM] != 0)
    for (long i = 0; i < k; ++i) wts[i] = wts[i] / (total + 1e-20f);
  for (long i = 0; i < k; ++i) wts[i] *= factor;
}

KTG_IN long experts_of(const Instr& in) {
  return in.op[1].kind == KIND_WEIGHT ? in.op[1].w.rows : in.op[1].t.dim[0];
}
KTG_IN long experts_pad(const Instr& in) { return round_up(experts_of(in), 64); }
// Staged rows are zero up to the widest padding of a packed gate: 64 columns (formats.cpp).
KTG_IN long route_pitch(const Instr& in) { return round_up(tensor(in, 0).dim[2], 64) + 16; }

static size_t route_shared(const Instr& in, const Sizes&) {
  return tensor(in, 0).dim[0] * experts_pad(in) * 4;
}
static size_t route_local(const Instr& in, const Sizes&) {
  return kPanelBytes + kTokenBlock * route_pitch(in) * 4;
}

// A unit is 64 experts and up to kTokenBlock tokens (16 and one row at a time when the gate is not
// packed).
static void gate_logits(const Ctx& ctx, const Instr& in, float* logits) {
  const TensorArg& x = tensor(in, 0);
  const bool packed = in.op[1].kind == KIND_WEIGHT;
  const long tokens = x.dim[0], experts = experts_of(in), pad = experts_pad(in),
             pitch = route_pitch(in);
  const long span = packed ? kUnitTiles * 16 : 16;
  const long pieces = ceil_div(experts, span), blocks = ceil_div(tokens, kTokenBlock);
  float* panel = reinterpret_cast<float*>(ctx.local);
  float* staged = reinterpret_cast<float*>(ctx.local + kPanelBytes);
  for (long u; (u = next_unit(ctx, 0)) < pieces * blocks;) {
    const long e0 = u % pieces * span, b = u / pieces, e1 = lmin(e0 + span, experts);
    const long t0 = tokens * b / blocks, rows = tokens * (b + 1) / blocks - t0;
    const float* rows_at[kTokenBlock];
    for (long m = 0; m < rows; ++m) {
      stage_row(x, t0 + m, 0, pitch, staged + m * pitch);
      rows_at[m] = staged + m * pitch;
    }
    if (packed) {
      const Tiles t = tiles_of(in.op[1].w, 0, e0 / 16, ceil_div(e1 - e0, 16));
      tiles_times_rows(t, rows_at, rows, logits + t0 * pad + e0, pad, panel);
      continue;
    }
    for (long m = 0; m < rows; ++m)
      gate_token(in.op[1].t, e0, e1, rows_at[m], logits + (t0 + m) * pad);
  }
}

// x, gate, bias -> ids, wts
static void moe_route(const Ctx& ctx, const Instr& in) {
  float* logits = reinterpret_cast<float*>(ctx.shared);
  gate_logits(ctx, in, logits);
  barrier(ctx);
  const TensorArg &ids = tensor(in, 3), &wts = tensor(in, 4);
  const float* bias = has(in, 2) ? f32_row(tensor(in, 2), 0) : nullptr;
  const Range r = my_range(ctx, ids.dim[0]);
  for (long t = r.begin; t < r.end; ++t)
    choose_experts(in, logits + t * experts_pad(in), bias, experts_of(in), ids.dim[2],
                   reinterpret_cast<int*>(row_ptr(ids, t, 0)),
                   reinterpret_cast<float*>(row_ptr(wts, t, 0)));
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
