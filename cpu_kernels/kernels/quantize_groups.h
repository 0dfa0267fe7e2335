// Packing of int4z, mxfp4, fp8 and f16, 16 rows at once. As in quantize.h nothing is fused, so
// numpy's reference gives the same bytes.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

KTG_IN F inverse_or_zero(F s) {
  const F inv = div(set1(1.0f), s);
  return select(less(abs(inv), set1(__builtin_inff())), inv, zero());
}
KTG_IN F clamp(F v, float low, float high) { return min(max(v, set1(low)), set1(high)); }

// A block of eight columns of integers 0..15.
KTG_IN void store_nibbles(char* block, const F (&q)[8]) {
  I word = to_int(zero());
  for (int i = 0; i < 8; ++i)
    word = bits_or(word, shift_left(to_int(q[i]), i < 4 ? 8 * i : 8 * (i - 4) + 4));
  store_block(block, word);
}

KTG_IN F peak_of(const float* cols, long n) {
  F peak = zero();
  for (long k = 0; k < n; ++k) peak = max(peak, abs(load(cols + k * 16)));
  return peak;
}

static void pack_int4z(const float* cols, const WeightArg& w, char* dst, u16* scales,
                       uint8_t* zeros) {
  for (long g = 0; g < w.groups; ++g) {
    const long k0 = g * w.group, n = lmin(w.group, w.kpad - k0);
    F low = zero(), high = zero();
    for (long k = k0; k < k0 + n; ++k)
      low = min(low, load(cols + k * 16)), high = max(high, load(cols + k * 16));
    store_f16(scales + g * 16, min(div(sub(high, low), set1(15.0f)), set1(65504.0f)));
    const F inv = inverse_or_zero(load_f16(scales + g * 16));
    const F z = round(clamp(mul(sub(zero(), low), inv), 0, 15));
    store_bytes(reinterpret_cast<int8_t*>(zeros) + g * 16, to_int(z));
    for (long k = k0; k < k0 + n; k += 8) {
      F q[8];
      for (int i = 0; i < 8; ++i)
        q[i] = round(clamp(add(mul(load(cols + (k + i) * 16), inv), z), 0, 15));
      store_nibbles(dst + k / 8 * kBlockBytes, q);
    }
  }
}

// The code of the e2m1 value nearest to x * inverse; ties to even codes, beyond 6 is 6.
KTG_IN F mxfp4_code(F x, F inverse) {
  const F v = min(mul(abs(x), inverse), set1(6.0f));
  const F fine = round(add(v, v)), middle = add(round(v), set1(2.0f));
  const F coarse = add(round(mul(v, set1(0.5f))), set1(4.0f));
  const F code = select(less(v, set1(2.0f)), fine, select(less(v, set1(4.0f)), middle, coarse));
  return add(code, select(less(x, zero()), set1(8.0f), zero()));
}

static void pack_mxfp4(const float* cols, const WeightArg& w, char* dst, uint8_t* codes) {
  for (long g = 0; g < w.groups; ++g) {
    const long k0 = g * w.group, n = lmin(w.group, w.kpad - k0);
    // The peak's exponent less 2 (that of the largest e2m1 value), biased by 127.
    const F exponent = to_float(shift_right<23>(bits_of(peak_of(cols + k0 * 16, n))));
    const F e = max(sub(exponent, set1(2.0f)), zero());
    float code[16];
    store(code, e);
    for (int r = 0; r < 16; ++r) codes[g * 16 + r] = uint8_t(code[r]);
    const F inverse = float_of(shift_left(to_int(sub(set1(254.0f), e)), 23));
    for (long k = k0; k < k0 + n; k += 8) {
      F q[8];
      for (int i = 0; i < 8; ++i) q[i] = mxfp4_code(load(cols + (k + i) * 16), inverse);
      store_nibbles(dst + k / 8 * kBlockBytes, q);
    }
  }
}

// The code of the e4m3 value nearest to x, |x| <= 448; ties to even codes.
KTG_IN F fp8_code(F x) {
  const F v = abs(x);
  const I bits = bits_of(v), odd = bits_and(shift_right<20>(bits), 1);
  const I rounded = shift_right<20>(iadd(iadd(bits, iset1(0x7FFFF)), odd));
  const F normal = to_float(isub(rounded, iset1(960)));  // 120, the exponents' biases apart, * 8
  const F code = select(less(v, set1(0x1p-6f)), round(mul(v, set1(512.0f))), normal);
  return add(code, select(less(x, zero()), set1(128.0f), zero()));
}

static void pack_fp8(const float* cols, const WeightArg& w, char* dst, float* scales) {
  for (long g = 0; g < w.groups; ++g) {
    const long k0 = g * w.group, n = lmin(w.group, w.kpad - k0);
    const F scale = div(peak_of(cols + k0 * 16, n), set1(448.0f));
    const F safe = select(equal(scale, zero()), set1(1.0f), scale);
    store(scales + g * 16, scale);
    for (long k = k0; k < k0 + n; k += 4) {
      I word = to_int(zero());
      for (int i = 0; i < 4; ++i) {
        const F code = fp8_code(clamp(div(load(cols + (k + i) * 16), safe), -448, 448));
        word = bits_or(word, shift_left(to_int(code), 8 * i));
      }
      store_block(dst + k / 4 * kBlockBytes, word);
    }
  }
}

static void pack_f16(const float* cols, long kpad, char* dst) {
  for (long k = 0; k < kpad; k += 2) {
    const I low = f16_bits(load(cols + k * 16)), high = f16_bits(load(cols + k * 16 + 16));
    store_block(dst + k / 2 * kBlockBytes, bits_or(low, shift_left(high, 16)));
  }
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
