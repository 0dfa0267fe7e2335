// exp, activations, sin and cos. Explicit operations only: equal bits on every ISA.
#pragma once
#include <math.h>

namespace ktg {
namespace KTG_ISA {
namespace {

// Cephes expf: about 1 ulp. Below -87.3 it gives 1.2e-38, above 88.37 it stays finite; NaN stays
// NaN.
KTG_IN F exp(F x) {
  x = min(set1(88.37f), max(set1(-87.3f), x));
  const F n = round(mul(x, set1(1.44269504f)));
  F r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, set1(1.0f)));
  return scale2(p, n);
}
KTG_IN F neg(F x) { return sub(zero(), x); }
KTG_IN F sigmoid(F x) { return div(set1(1.0f), add(set1(1.0f), exp(neg(x)))); }
KTG_IN F tanh(F x) { return sub(set1(1.0f), div(set1(2.0f), add(exp(add(x, x)), set1(1.0f)))); }

KTG_IN F gelu(F x) {  // erf: libm lane by lane; no large model's experts use it
  float v[16];
  store(v, x);
  for (float& e : v) e = 0.5f * e * (1.0f + ::erff(e * 0.70710678f));
  return load(v);
}

struct ActArgs {
  int act;
  float alpha, limit;
};

// act(gate) * up
KTG_IN F gated(const ActArgs& a, F g, F u) {
  switch (a.act) {
    case ACT_SILU:
      return mul(mul(g, sigmoid(g)), u);
    case ACT_GELU:
      return mul(gelu(g), u);
    case ACT_GELU_TANH: {
      const F inner = mul(set1(0.7978845608f), fma(mul(mul(g, g), g), set1(0.044715f), g));
      return mul(mul(g, sigmoid(add(inner, inner))), u);
    }
    case ACT_RELU:
      return mul(max(zero(), g), u);
    default: {  // gpt-oss: both halves clamped, (up + 1) * gate * sigmoid(alpha * gate)
      g = min(set1(a.limit), g);
      u = max(set1(-a.limit), min(set1(a.limit), u));
      return mul(add(u, set1(1.0f)), mul(g, sigmoid(mul(set1(a.alpha), g))));
    }
  }
}

// Sine and cosine of an f32 angle, right to f32 rounding: reduced and evaluated in f64 (fdlibm's
// polynomials).
KTG_IN void sincos_f32(float angle, float* s, float* c) {
  const double x = angle;
  if (!(__builtin_fabs(x) < 1e9)) {
    *s = float(::sin(x)), *c = float(::cos(x));
    return;
  }
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  const double n = (x * 0.63661977236758134308 + magic) - magic;
  double r = __builtin_fma(-n, 1.5707963267948965580, x);
  r = __builtin_fma(-n, 6.123233995736766e-17, r);
  const double z = r * r;
  double ps = 1.58969099521155010221e-10;
  ps = __builtin_fma(ps, z, -2.50507602534068634195e-08);
  ps = __builtin_fma(ps, z, 2.75573137070700676789e-06);
  ps = __builtin_fma(ps, z, -1.98412698298579493134e-04);
  ps = __builtin_fma(ps, z, 8.33333333332248946124e-03);
  ps = __builtin_fma(ps, z, -1.66666666666666324348e-01);
  const double sine = __builtin_fma(r * z, ps, r);
  double pc = 2.08757232129817482790e-09;
  pc = __builtin_fma(pc, z, -2.75573143513906633035e-07);
  pc = __builtin_fma(pc, z, 2.48015872894767294178e-05);
  pc = __builtin_fma(pc, z, -1.38888888888741095749e-03);
  pc = __builtin_fma(pc, z, 4.16666666666666019037e-02);
  const double cosine = __builtin_fma(z * z, pc, __builtin_fma(z, -0.5, 1.0));
  const int quadrant = int(long(n)) & 3;
  const double a = quadrant & 1 ? cosine : sine, b = quadrant & 1 ? sine : cosine;
  *s = float(quadrant & 2 ? -a : a);
  *c = float((quadrant + 1) & 2 ? -b : b);
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
