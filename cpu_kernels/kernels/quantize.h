// Packs a matrix into tiles (docs/layouts.md). Lanes are the 16 rows of a tile; no fused
// multiply-add, so numpy's reference gives the same bytes.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

constexpr float kDivisors[16] = {-8, -7.5f, -8.5f, -7, -9, -6.5f, -9.5f, -10,
                                 7,  7.5f,  6.5f,  8,  6,  8.5f,  9,     9.5f};
constexpr int kRowScales = 7;  // candidates for an int4p row: its largest group gets about 11..15
constexpr float kRowDivisors[kRowScales] = {105, 112, 98, 119, 91, 126, 84};

// Columns as vectors of 16 rows: cols[k][16]. Missing rows and columns are 0.
static long load_columns(const PackJob& job, const long (&rows)[16], float* cols) {
  const WeightArg& w = job.w;
  const float most = w.format == FMT_F16 ? 65504.0f : 3.40282347e38f;
  for (long k = 0; k < w.kpad * 16; ++k) cols[k] = 0.0f;
  for (int r = 0; r < 16; ++r) {
    if (rows[r] < 0) continue;
    const char* src = job.src + rows[r] * job.src_stride * item_bytes(job.src_dtype);
    bool finite = true;
    for (long k = 0; k < w.cols; ++k) {
      const float v = job.src_dtype == DT_F32 ? reinterpret_cast<const float*>(src)[k]
                                              : bf16_to_f32(reinterpret_cast<const u16*>(src)[k]);
      cols[k * 16 + r] = v;
      finite &= v <= most && v >= -most;
    }
    if (!finite) return rows[r];
  }
  return -1;
}

static void pack_int8(const float* cols, long kpad, char* dst, float* scales) {
  F top = zero();
  for (long k = 0; k < kpad; ++k) top = max(top, abs(load(cols + k * 16)));
  const F scale = div(top, set1(127.0f));
  const F safe = select(equal(scale, zero()), set1(1.0f), scale);
  store(scales, scale);
  for (long k = 0; k < kpad; k += 4) {
    I word = to_int(zero());
    for (int i = 0; i < 4; ++i) {
      const F q =
          round(max(set1(-127.0f), min(set1(127.0f), div(load(cols + (k + i) * 16), safe))));
      word = bits_or(word, shift_left(bits_and(to_int(q), 0xFF), 8 * i));
    }
    store_block(dst + k / 4 * kBlockBytes, word);
  }
}

static void pack_int8_groups(const float* cols, const WeightArg& w, char* dst, float* scales) {
  for (long g = 0; g < w.groups; ++g) {
    const long k0 = g * w.group, n = lmin(w.group, w.kpad - k0);
    pack_int8(cols + k0 * 16, n, dst + k0 / 4 * kBlockBytes, scales + g * 16);
  }
}

KTG_IN F int4_round(F x, F inverse) {
  return round(min(max(mul(x, inverse), set1(-8.0f)), set1(7.0f)));
}

// The scale of least squared error among the candidates; n columns of 16 rows.
static F best_int4_scale(const float* cols, long n) {
  F top = zero(), peak = zero();
  for (long k = 0; k < n; ++k) {
    const F v = load(cols + k * 16), a = abs(v);
    const Mask more = less(top, a);
    top = select(more, a, top), peak = select(more, v, peak);
  }
  F best = zero(), least = zero();
  for (int c = 0; c < 16; c += 4) {  // four candidates side by side hide the latency of each sum
    F s[4], inv[4], error[4];
    for (int i = 0; i < 4; ++i) {
      s[i] = select(equal(peak, zero()), zero(), bf16_round(div(peak, set1(kDivisors[c + i]))));
      inv[i] = inverse_or_zero(s[i]), error[i] = zero();
    }
    for (long k = 0; k < n; ++k) {
      const F v = load(cols + k * 16);
      for (int i = 0; i < 4; ++i) {
        const F e = sub(v, mul(int4_round(v, inv[i]), s[i]));
        error[i] = add(error[i], mul(e, e));
      }
    }
    for (int i = 0; i < 4; ++i) {
      const Mask better = less(error[i], least);
      const bool first = c + i == 0;
      best = first ? s[i] : select(better, s[i], best);
      least = first ? error[i] : select(better, error[i], least);
    }
  }
  return best;
}

static void pack_int4(const float* cols, const WeightArg& w, char* dst, u16* scales) {
  for (long g = 0; g < w.groups; ++g) {
    const long k0 = g * w.group, n = lmin(w.group, w.kpad - k0);
    const F s = best_int4_scale(cols + k0 * 16, n), inv = inverse_or_zero(s);
    store_bf16(scales + g * 16, s);
    for (long k = k0; k < k0 + n; k += 8) {
      I word = to_int(zero());
      for (int i = 0; i < 8; ++i) {
        const F q = add(int4_round(load(cols + (k + i) * 16), inv), set1(8.0f));
        word = bits_or(word, shift_left(to_int(q), i < 4 ? 8 * i : 8 * (i - 4) + 4));
      }
      store_block(dst + k / 8 * kBlockBytes, word);
    }
  }
}

// int4p, one group of 16 rows: the largest magnitudes, and the integers' bounds: -8..7 where the
// largest element is negative or all are 0, else -7..8.
struct Int4pGroup {
  F peak, low, high;
};

static Int4pGroup int4p_group(const float* cols, long n) {
  F peak = zero(), at_peak = zero();
  for (long k = 0; k < n; ++k) {
    const F v = load(cols + k * 16), a = abs(v);
    const Mask more = less(peak, a);
    peak = select(more, a, peak), at_peak = select(more, v, at_peak);
  }
  const F low = select(less(zero(), at_peak), set1(-7.0f), set1(-8.0f));
  return {peak, low, add(low, set1(15.0f))};
}

KTG_IN F int4p_round(F x, F inverse, const Int4pGroup& g) {
  return round(min(max(mul(x, inverse), g.low), g.high));
}

struct Int4pFactor {
  F factor, error;
};

// The factor of least squared error among those near peak / 7.5, given the rows' scale.
static Int4pFactor best_int4p_factor(const float* cols, long n, const Int4pGroup& g, F scale) {
  constexpr float steps[4] = {0, -1, -2, 1};
  const F guess = round(mul(g.peak, inverse_or_zero(mul(set1(7.5f), scale))));
  F factor[4], s[4], inv[4], error[4];  // side by side they hide the latency of each sum
  for (int i = 0; i < 4; ++i) {
    factor[i] = max(set1(1.0f), min(set1(15.0f), add(guess, set1(steps[i]))));
    factor[i] = select(equal(g.peak, zero()), zero(), factor[i]);
    s[i] = mul(factor[i], scale), inv[i] = inverse_or_zero(s[i]), error[i] = zero();
  }
  for (long k = 0; k < n; ++k) {
    const F v = load(cols + k * 16);
    for (int i = 0; i < 4; ++i) {
      const F e = sub(v, mul(int4p_round(v, inv[i], g), s[i]));
      error[i] = add(error[i], mul(e, e));
    }
  }
  Int4pFactor best{factor[0], error[0]};
  for (int i = 1; i < 4; ++i) {
    const Mask better = less(error[i], best.error);
    best.factor = select(better, factor[i], best.factor);
    best.error = select(better, error[i], best.error);
  }
  return best;
}

// The rows' scale of least squared error among max|row| / kRowDivisors.
static F best_int4p_scale(const float* cols, const WeightArg& w) {
  F scale[kRowScales], error[kRowScales];
  const F top = peak_of(cols, w.kpad);
  for (int i = 0; i < kRowScales; ++i)
    scale[i] = div(top, set1(kRowDivisors[i])), error[i] = zero();
  for (long g = 0; g < w.groups; ++g) {
    const float* at = cols + g * w.group * 16;
    const long n = lmin(w.group, w.kpad - g * w.group);
    const Int4pGroup group = int4p_group(at, n);
    for (int i = 0; i < kRowScales; ++i)
      error[i] = add(error[i], best_int4p_factor(at, n, group, scale[i]).error);
  }
  F best = scale[0], least = error[0];
  for (int i = 1; i < kRowScales; ++i) {
    const Mask better = less(error[i], least);
    best = select(better, scale[i], best), least = select(better, error[i], least);
  }
  return best;
}

static void pack_int4p(const float* cols, const WeightArg& w, char* dst, uint8_t* codes,
                       float* row_scales) {
  const F scale = best_int4p_scale(cols, w);
  store(row_scales, scale);
  for (long g = 0; g < w.groups; ++g) {
    const long k0 = g * w.group, n = lmin(w.group, w.kpad - k0);
    const Int4pGroup group = int4p_group(cols + k0 * 16, n);
    const F factor = best_int4p_factor(cols + k0 * 16, n, group, scale).factor;
    const F inv = inverse_or_zero(mul(factor, scale)), offset = sub(zero(), group.low);
    float code[16];
    store(code, add(factor, mul(sub(set1(8.0f), offset), set1(128.0f))));
    for (int r = 0; r < 16; ++r) codes[g * 16 + r] = uint8_t(code[r]);
    for (long k = k0; k < k0 + n; k += 8) {
      F q[8];
      for (int i = 0; i < 8; ++i)
        q[i] = add(int4p_round(load(cols + (k + i) * 16), inv, group), offset);
      store_nibbles(dst + k / 8 * kBlockBytes, q);
    }
  }
}

static void pack_tile(const PackJob& job, long tile, const float* cols) {
  const WeightArg& w = job.w;
  char* dst = job.dst + tile * w.tile_bytes;
  char* scales = job.dst + w.scale_offset;
  const long place = tile * w.groups * 16;
  switch (w.format) {
    case FMT_F32:
      __builtin_memcpy(dst, cols, size_t(w.kpad) * 64);
      return;
    case FMT_BF16:
      for (long k = 0; k < w.kpad; k += 2) {
        const I low = bf16_bits(load(cols + k * 16)), high = bf16_bits(load(cols + k * 16 + 16));
        store_block(dst + k / 2 * kBlockBytes, bits_or(low, shift_left(high, 16)));
      }
      return;
    case FMT_INT8:
      pack_int8(cols, w.kpad, dst, reinterpret_cast<float*>(scales) + tile * 16);
      return;
    case FMT_INT4:
      pack_int4(cols, w, dst, reinterpret_cast<u16*>(scales) + place);
      return;
    case FMT_INT8G:
      pack_int8_groups(cols, w, dst, reinterpret_cast<float*>(scales) + place);
      return;
    case FMT_INT4Z:
      pack_int4z(cols, w, dst, reinterpret_cast<u16*>(scales) + place,
                 reinterpret_cast<uint8_t*>(job.dst + w.outer_offset) + place);
      return;
    case FMT_MXFP4:
      pack_mxfp4(cols, w, dst, reinterpret_cast<uint8_t*>(scales) + place);
      return;
    case FMT_F16:
      pack_f16(cols, w.kpad, dst);
      return;
    case FMT_FP8:
      pack_fp8(cols, w, dst, reinterpret_cast<float*>(scales) + place);
      return;
    default:
      pack_int4p(cols, w, dst, reinterpret_cast<uint8_t*>(scales) + place,
                 reinterpret_cast<float*>(job.dst + w.outer_offset) + tile * 16);
  }
}

static long pack(const PackJob& job) {
  const WeightArg& w = job.w;
  for (long tile = 0; tile < w.tiles; ++tile) {
    long rows[16];
    const long half = w.gate_up ? w.rows / 2 : w.rows;  // rows of one part
    const long part = w.gate_up ? tile % 2 : 0, first = (w.gate_up ? tile / 2 : tile) * 16;
    for (int r = 0; r < 16; ++r) rows[r] = first + r < half ? part * half + first + r : -1;
    const long bad = load_columns(job, rows, job.rows);
    if (bad >= 0) return bad;
    pack_tile(job, tile, job.rows);
  }
  return -1;
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
